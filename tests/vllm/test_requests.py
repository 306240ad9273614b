"""Tests kinds of requests: several samples, beams, grammars, adapters, and equal ids.

Each answer must equal that of an engine without a cache. The engine with the connector has two steps in
flight, and vLLM's default policy, which fails requests whose load fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.engine_rig import (
    MARKS,
    Asked,
    Hands,
    Held,
    Reports,
    Rig,
    check_reloads,
    offloading,
    plain,
    prompt,
    transfer_config,
)
from tests.vllm.stock import adapters

pytestmark = MARKS

PROMPT_BLOCKS = 8  # the number of whole blocks in a prompt
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 160,  # enough to store the blocks of all requests
    "skip_tokenizer_init": False,  # beams and grammars need a tokenizer
    "structured_outputs_config": {"backend": "xgrammar"},
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    # On a CPU, vLLM raises an error if the prompt of a request with a seed is chunked.
    "max_num_batched_tokens": 4096,
}
DEFAULT_POLICY = {
    name: value for name, value in transfer_config(512).items() if name != "kv_load_failure_policy"
}


class Said(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


Answers = list[list[Said]]  # for each request, its samples or beams


def ask(rig: Rig, name: str, text: int, *, adapter: object = None, **sampling: Any) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling},
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    asked = {"prompt_token_ids": list(prompt(text))}
    rig.llm.llm_engine.add_request(name, asked, params, lora_request=adapter)


def finish(rig: Rig) -> list[Any]:
    done = []
    while rig.scheduler.has_requests():
        done += rig.llm.llm_engine.step()
    return done


def answers(rig: Rig) -> Answers:
    """Step until all requests end. Return the answers, sorted by request name and then by tokens."""
    said = [
        (
            output.request_id,
            [
                Said(
                    tuple(one.token_ids),
                    tuple(
                        place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True)
                    ),
                )
                for one in sorted(output.outputs, key=lambda one: one.index)
            ],
        )
        for output in finish(rig)
    ]
    return [one for _, one in sorted(said)]


def adapter(folder: Path, name: str) -> Any:
    from vllm.lora.request import LoRARequest

    number = ord(name) - ord("a") + 1
    return LoRARequest(name, number, str(adapters.make(folder / "adapters" / name, seed=number)))


# -- the requests -------------------------------------------------------------------------------------------------------


def samples(rig: Rig, _: Path) -> Answers:
    for seed in range(4):
        ask(rig, f"{seed}", seed, n=3, temperature=1.0, seed=seed)
    return answers(rig)


def beams(rig: Rig, _: Path) -> Answers:
    """Each step of a beam search makes one request per beam. The beams are longer than a block."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt(seed))} for seed in (10, 11)]
    found = rig.llm.beam_search(prompts, params, use_tqdm=False)
    finish(rig)
    return [[Said(tuple(beam.tokens), (beam.cum_logprob,)) for beam in one.sequences] for one in found]


def grammars(rig: Rig, _: Path) -> Answers:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: list[dict[str, Any]] = [
        {"json": schema},
        {"choice": ["alpha", "beta", "gamma"]},
        {"regex": "[0-9]{3}-[a-f]{2,40}!"},
        {"grammar": 'root ::= "(" [a-z] [a-z]* ")" "," root | "x"'},
    ]
    for number, kind in enumerate(kinds):
        outputs = StructuredOutputsParams(**kind)
        ask(rig, f"{number}", 20 + number, max_tokens=40, ignore_eos=False, structured_outputs=outputs)
    return answers(rig)


def one_prompt_for_each_adapter(rig: Rig, folder: Path) -> Answers:
    """Run requests with and without adapters in separate batches.

    On a CPU, vLLM uses the last adapter's weights for requests without an adapter in the same batch.
    """
    for seed in (30, 31):
        for name in "ab":
            ask(rig, f"{seed}{name}", seed, adapter=adapter(folder, name))
    with_adapters = answers(rig)
    for seed in (30, 31):
        ask(rig, f"{seed}", seed)
    return with_adapters + answers(rig)


def equal_ids(rig: Rig, _: Path) -> Answers:
    for seed in (40, 41, 40):
        ask(rig, "same", seed)
    at_once = answers(rig)
    ask(rig, "same", 42)
    return at_once + answers(rig)


KINDS: Mapping[
    str, tuple[Callable[[Rig, Path], Answers], int]
] = {  # for each kind: its function, and the number of prompts that must be found completely
    "samples": (samples, 4),
    "beams": (beams, 2),
    "grammars": (grammars, 4),
    "adapters": (one_prompt_for_each_adapter, 6),
    "equal ids": (equal_ids, 3),
}

# -- the engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Answers]:
    with plain("qwen3", folder, enable_prefix_caching=False, **OPTIONS) as rig:
        return {name: kind(rig, folder) for name, (kind, _) in KINDS.items()}


@pytest.fixture(scope="module")
def engine(folder: Path, expected: dict[str, Answers]) -> Iterator[Hands]:
    held = Held()
    with offloading(
        "qwen3", folder, held=held, two_steps=True, kv_transfer_config=DEFAULT_POLICY, **OPTIONS
    ) as rig:
        yield rig, held


def agree(given: Answers, expected: Answers) -> bool:
    tokens = [[said.tokens for said in one] for one in given]
    logprobs = [number for one in given for said in one for number in said.logprobs]
    expected_logprobs = [number for one in expected for said in one for number in said.logprobs]
    return tokens == [[said.tokens for said in one] for one in expected] and logprobs == pytest.approx(
        expected_logprobs, abs=1e-3
    )


@pytest.mark.parametrize("name", KINDS)
def test_answers_equal_those_of_an_uncached_run(
    name: str, hands: Hands, expected: dict[str, Answers], folder: Path
) -> None:
    rig, _ = hands
    kind, prompts = KINDS[name]
    check_reloads(rig, lambda: agree(kind(rig, folder), expected[name]), prompts * PROMPT_BLOCKS)


def test_several_samples_of_one_prompt_load_its_blocks_once(hands: Hands) -> None:
    rig, _ = hands
    rig.put_on_host_only(prompt(50))
    before = rig.counts
    ask(rig, "a", 50, n=4, temperature=1.0, seed=1)
    ((*four,),) = answers(rig)
    assert len({one.tokens for one in four}) == 4
    assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") == PROMPT_BLOCKS


def test_requests_with_different_adapters_share_no_blocks_on_the_host(hands: Hands, folder: Path) -> None:
    rig, _ = hands
    found = []
    for name in ("a", "b", None, "a", "b", None):
        ask(rig, "one", 51, adapter=name and adapter(folder, name))
        found += [output.num_cached_tokens for output in finish(rig)]
        assert rig.scheduler.reset_prefix_cache()
    assert found == [0, 0, 0] + [PROMPT_BLOCKS * 32] * 3


def test_a_failed_load_fails_only_its_request(hands: Hands) -> None:
    """By default, vLLM fails the request whose load failed. Another request with the same prompt computes the
    blocks.
    """
    rig, held = hands
    expected = rig.run({"a": Asked(prompt(52), 6)})["a"]
    assert rig.scheduler.reset_prefix_cache()
    held.copier.hold()
    ask(rig, "first", 52, max_tokens=6)
    rig.until(lambda: held.loads)
    ask(rig, "second", 52, max_tokens=6)
    rig.step()
    with Reports(rig) as reports:
        held.loads[0].fail()
        held.copier.release()
        done = {output.request_id: output.outputs[0] for output in finish(rig)}
    assert reports.failed == reports.received == ["first"]
    assert (done["first"].finish_reason, list(done["first"].token_ids)) == ("error", [])
    assert tuple(done["second"].token_ids) == expected.tokens
