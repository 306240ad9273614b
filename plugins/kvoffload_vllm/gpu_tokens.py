"""vLLM's token check in `kvoffload gpu-check`: vLLM must give the same answers with kvoffload as without it.

Each engine runs in a separate process and gets the same prompts. An engine with kvoffload gets the prompts three times.
In the first round the engine stores blocks. Then the check resets vLLM's prefix cache, so in the second round the
engine loads the blocks from the host. Before the third round, the control, the check overwrites the blocks on the host,
so the answers must differ.

The model's random weights have a wide spread. With vLLM's dummy weights, overwritten blocks would change the
log-probabilities no more than rounding does.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvoffload.core.machine import SlotState
from kvoffload.gpu_check.parts import CheckPart, Line, Options, lines_of, measured
from kvoffload.model.ids import SlotId
from kvoffload_vllm.gpu_check import ENVIRONMENT, ON_GPU, VOCABULARY, Engine, check_machine, write_model

PROMPTS = 24
TOKENS = 32
_FEWER_PROMPTS = 5
_STEMS = 4  # the number of prefixes; each prompt begins with one of them
_LONGEST_STEM, _LONGEST_TAIL = 160, 64
_WIDTH = 0.15  # the standard deviation of the weights
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
}
# An answer is wrong if a log-probability differs by more than _LEAST_LIMIT and by more than _TIMES_NOISE times the
# difference between two runs without kvoffload. On a CPU, a block with another block's bytes changed a log-probability
# by 0.6 or more; rounding (bfloat16 instead of float32) changed log-probabilities by up to 0.16. Rounding also changed
# a token in 11 of 24 answers, so a different token alone does not make an answer wrong.
_LEAST_LIMIT = 0.05
_TIMES_NOISE = 3
_MOST_NOISE = 0.2
_NOT_A_NUMBER = 1e6  # the difference between two log-probabilities if one is infinite or NaN
_HERE = "kvoffload_vllm.gpu_tokens"
_ENGINE_S = 150
_PINNING_S = 90
_FEW_BYTES = 1 << 30
_EAGER: Mapping[str, Any] = {**ON_GPU, "dtype": "float32", "compilation_config": {}, "enforce_eager": True}

Answer = list[tuple[int, list[float]]]
"""For each generated token: its id, and the log-probability of every token in the vocabulary at that position."""


@dataclass(frozen=True, slots=True)
class Mode:
    """The engines of one comparison: an engine without kvoffload, and one engine for each entry of `settings`.

    Args:
        what: the prefix of each output line.
        engine: vLLM's options for all engines.
        settings: kvoffload's settings for each engine with kvoffload, by the label that follows `what`.
    """

    what: str
    engine: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]


def lines(options: Options) -> Iterator[Line]:
    """Compare vLLM's answers with and without kvoffload on a GPU, and yield the output lines.

    Args:
        options: the options of `kvoffload gpu-check`.

    Raises:
        NotHere: vLLM is not installed, the machine has too little memory, or torch sees no GPU.
    """
    check_machine(options)
    os.environ.update(ENVIRONMENT)
    few = {"host_bytes": _FEW_BYTES}
    with_graphs: dict[str, dict[str, Any]] = {
        # Pinning `options.host_bytes` takes so long that vLLM captures its CUDA graphs at the same time.
        "": {"host_bytes": options.host_bytes},
        ', layout "blocks"': {**few, "layout": "blocks"},
        ', batch_copies "off"': {**few, "batch_copies": "off"},
    }
    modes = [
        Mode("vLLM, float32, eager", _EAGER, {"": few}),
        Mode("vLLM, bfloat16, CUDA graphs", ON_GPU, with_graphs),
    ]
    yield from compared(options, modes)


def compared(options: Options, modes: Sequence[Mode]) -> Iterator[Line]:
    """Run the engines of each mode, one engine at a time, and yield their output lines."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_weights(model)
        for number, mode in enumerate(modes):
            expected = model / f"{number}.json"
            what = f"{mode.what}, without kvoffload"
            own: tuple[object, ...] = (model, expected, mode.engine, what)
            yield from _found(CheckPart(what, f"{_HERE}:plain", _ENGINE_S, own), options)
            if not expected.exists():
                continue  # the engine failed, and `_found` has yielded the reason
            for row, settings in mode.settings.items():
                what = f"{mode.what}{row}"
                own = (model, expected, mode.engine, what, settings)
                yield from _found(
                    CheckPart(what, f"{_HERE}:offloading", _ENGINE_S, own, is_check=True), options
                )


def _found(part: CheckPart, options: Options) -> Iterator[Line]:
    """Run a part in another process, yield the part's output lines, and copy the part's log to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        yield from lines_of(part, options, log)
        sys.stderr.write(log.read_text(errors="replace"))


def plain(
    options: Options, model: Path, target: Path, engine: Mapping[str, Any], what: str
) -> Iterator[Line]:
    """Run vLLM without kvoffload, with two batch sizes, and write the answers and their largest difference to a file.

    Args:
        options: the options of `kvoffload gpu-check`.
        model: the model's folder.
        target: the file to write.
        engine: vLLM's options.
        what: the prefix of each output line.
    """
    with closing(_engine(model, engine, None)) as vllm:
        answers, again = _answers(vllm), _answers(vllm, at_once=_FEWER_PROMPTS)
    noise = max(map(_difference, answers, again))
    text = f"{what}: largest difference of a log-probability between {PROMPTS} prompts at once and {_FEWER_PROMPTS}"
    yield measured(text, [noise], at_most=_MOST_NOISE)
    target.write_text(json.dumps({"answers": answers, "noise": noise}))


def offloading(
    options: Options,
    model: Path,
    expected: Path,
    engine: Mapping[str, Any],
    what: str,
    settings: Mapping[str, Any],
) -> Iterator[Line]:
    """Run vLLM with kvoffload, and compare the answers to the answers without kvoffload.

    Args:
        options: the options of `kvoffload gpu-check`.
        model: the model's folder.
        expected: the file that `plain` wrote.
        engine: vLLM's options.
        what: the prefix of each output line.
        settings: kvoffload's settings.

    Raises:
        RuntimeError: vLLM did not reset its cache.
    """
    found = json.loads(expected.read_text())
    limit = max(_LEAST_LIMIT, _TIMES_NOISE * found["noise"])
    compare = partial(_compared, expected=found["answers"], limit=limit)
    with closing(_engine(model, engine, settings)) as vllm:
        vllm.fill_host_memory(_PINNING_S)
        yield from compare(f"{what}, while blocks are stored", _answers(vllm))
        before = _loaded(vllm)
        _reset(vllm)
        answers = _answers(vllm)
        loaded = _loaded(vllm) - before
        text = f"{what}: blocks loaded from the host"
        yield measured(text, [loaded], at_least=1)
        if not loaded:
            return
        yield from compare(f"{what}, from the host", answers)
        _reset(vllm)
        _overwrite(vllm)
        differing = _wrong(_answers(vllm), found["answers"], limit)
    text = f"{what}, control: prompts of {PROMPTS} that differ when the blocks on the host are overwritten"
    yield measured(text, [differing], at_least=PROMPTS)


def write_weights(folder: Path) -> None:
    """Write a small model whose random weights vary so much that each token depends on the whole context."""
    import torch
    import transformers

    write_model(folder, _SHAPE)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # norms keep their weights
                weight.normal_(0, _WIDTH, generator=draw)
    model.save_pretrained(folder)


def _engine(model: Path, options: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Engine:
    return Engine(model, settings, {"load_format": "auto", "max_logprobs": VOCABULARY, **options})


def _answers(vllm: Engine, at_once: int = PROMPTS) -> list[Answer]:
    """Serve all prompts in batches of `at_once`, and return the answers after all copies have ended."""
    prompts, outputs = _prompts(), list[Any]()
    for start in range(0, PROMPTS, at_once):
        outputs += vllm.serve(prompts[start : start + at_once], TOKENS, logprobs=VOCABULARY)[2]
    best = [output.outputs[0] for output in outputs]
    return [_answer(one.token_ids, one.logprobs) for one in best]


def _answer(tokens: Sequence[int], places: Sequence[Mapping[int, Any]]) -> Answer:
    return [
        (token, [place[one].logprob for one in range(VOCABULARY)])
        for token, place in zip(tokens, places, strict=True)
    ]


def _prompts() -> list[list[int]]:
    draw = random.Random(0)

    def tokens(least: int, most: int) -> list[int]:
        return draw.choices(range(2, VOCABULARY), k=draw.randint(least, most))

    stems = [tokens(_LONGEST_STEM // 2, _LONGEST_STEM) for _ in range(_STEMS)]
    return [stems[number % _STEMS] + tokens(1, _LONGEST_TAIL) for number in range(PROMPTS)]


def _loaded(vllm: Engine) -> int:
    counts = vllm.offload.counters.snapshot()
    return int(counts.count("kvoffload_load_blocks_total", "loaded"))


def _reset(vllm: Engine) -> None:
    if not vllm.llm.reset_prefix_cache():
        raise RuntimeError("vLLM does not reset its cache: blocks are in use although no request runs")


def _overwrite(vllm: Engine) -> None:
    """Overwrite every number in the host's blocks with 0.75."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker: Any = get_kv_transfer_group()
    arena = worker.offload.pump._arena
    pool = vllm.offload.core.state.pool
    for slot in map(SlotId, range(pool.capacity)):
        if pool.state(slot) is SlotState.READY:
            for page in arena.pages(slot):
                page[:] = b"\x3f" * len(page)


def _compared(
    what: str, answers: Sequence[Answer], expected: Sequence[Answer], limit: float
) -> Iterator[Line]:
    wrong = _wrong(answers, expected, limit)
    text = f"{what}: prompts of {len(answers)} that differ by more than {limit:.2g}"
    yield measured(text, [wrong], at_most=0, is_check=True)
    largest = max(map(_difference, answers, expected))
    yield measured(f"{what}: largest difference of a log-probability", [largest])
    changed = sum(_tokens(mine) != _tokens(other) for mine, other in zip(answers, expected, strict=True))
    yield measured(f"{what}: prompts with another token", [changed])


def _wrong(answers: Sequence[Answer], expected: Sequence[Answer], limit: float) -> int:
    return sum(_difference(*pair) > limit for pair in zip(answers, expected, strict=True))


def _tokens(answer: Answer) -> list[int]:
    return [token for token, _ in answer]


def _difference(mine: Answer, other: Answer) -> float:
    """Return the largest difference between two answers in the log-probability of a chosen token.

    The comparison ends at the first position where the answers have different tokens, because later tokens have
    different contexts. At that position, the comparison covers both tokens. If both answers gave the two tokens about
    the same probability, the difference stays small.
    """
    found = 0.0
    for (token, values), (expected, others) in zip(mine, other, strict=True):
        for one in (token, expected):
            difference = abs(values[one] - others[one])
            found = max(found, difference if math.isfinite(difference) else _NOT_A_NUMBER)
        if token != expected:
            break
    return found
