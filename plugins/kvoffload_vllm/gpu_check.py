"""vLLM's part of `kvoffload gpu-check`: an engine that offloads to much host memory beside one that does not.

Both run in a process of their own, with the same model, whose weights vLLM makes up; on a GPU with CUDA graphs, because
memory is pinned in the same minute in which vLLM captures them. In turns they decode the same prompts, and the blocks that
these fill are stored meanwhile. At last vLLM's own cache is reset, and the same prompts are found on the host.

    python -m kvoffload_vllm.gpu_check HOST_BYTES
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvoffload.bench.lines import Line, line, not_run, ratios
from kvoffload.transfer.host_memory import available_bytes, read_file
from kvoffload_vllm.bench_engines import (
    BLOCK,
    OURS,
    VOCABULARY,
    Rider,
    kv_transfer,
    open_riders,
    prepare_process,
)

RUNNING = 32
PROMPT_TOKENS = 4 * BLOCK + 1
TOKENS = 4 * BLOCK
PAIRS = 6
_PLAIN = "plain"
_SPARE_BYTES = 8 << 30  # of host memory, for two engines
_LONGEST_S = 420
_PINNING_S = 240
_ON_GPU: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "gpu_memory_utilization": 0.3,
}
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
}


def lines(host_bytes: int) -> Iterator[Line]:
    """Yield what a vLLM with that much host memory shows, or one line that says why it was not run."""
    what = f"vLLM with host_bytes {host_bytes / 2**30:g}GiB"
    if importlib.util.find_spec("vllm") is None:
        yield not_run(what, "vLLM is not installed")
        return
    available = available_bytes(read_file)
    if available is not None and available < host_bytes + _SPARE_BYTES:
        yield not_run(what, f"the machine has {available / 2**30:.3g} GiB of memory left")
        return
    command = [sys.executable, "-m", "kvoffload_vllm.gpu_check", str(host_bytes)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LONGEST_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        yield Line(f"{what}: {error}; {said[-500:]}", None, is_met=False, is_check=True)
        return
    yield from (Line(**plain) for plain in json.loads(ended.stdout.splitlines()[-1]))


def measure(
    what: str, host_bytes: int, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Line]:
    """Start both engines and compare them.

    Args:
        what: begins each line.
        host_bytes: of the engine that offloads.
        shape: of the model.
        options: of the engines.
    """
    connectors = {_PLAIN: None, OURS: kv_transfer("KVOffloadConnector", host_bytes=host_bytes)}
    draw, begun = random.Random(0), time.perf_counter()
    blocks = RUNNING * (PROMPT_TOKENS + TOKENS) // BLOCK * 2
    sizes = {"num_gpu_blocks_override": blocks, "max_model_len": PROMPT_TOKENS + TOKENS}
    with open_riders("qwen3", connectors, RUNNING, shape, **{**sizes, **options}) as (plain, ours):
        yield line(f"{what}: both engines have started after", [time.perf_counter() - begun], " s")
        yield from _ready(what, ours, draw)
        found: dict[Rider, list[float]] = {plain: [], ours: []}
        for pair in range(PAIRS + 1):
            prompts = _prompts(draw)
            for rider in (plain, ours) if pair % 2 else (ours, plain):
                seconds = _decoding(rider, prompts)
                if pair:  # the first warms up
                    found[rider].append(seconds)
        yield line(
            f"{what}: a decoding step, over one without", ratios(found[ours], found[plain]), at_most=1.02
        )
        yield line(f"{what}: a decoding step without", [1e3 * one for one in found[plain]], " ms")
        ours.llm.reset_prefix_cache()
        tokens = _cached_tokens(ours, prompts)
        text = f"{what}: tokens found on the host, of {RUNNING * PROMPT_TOKENS:,} that vLLM's cache had lost"
        yield line(text, [tokens], "", at_least=1, is_check=True)


def _ready(what: str, ours: Rider, draw: random.Random) -> Iterator[Line]:
    """Serve until all host memory is ready."""
    state = ours.connector._scheduler.offload.core.state
    begun = time.perf_counter()
    while state.growing and time.perf_counter() - begun < _PINNING_S:
        ours.serve([_prompt(draw)], 8)
    yield line(f"{what}: host memory is ready, while it served, after", [time.perf_counter() - begun], " s")
    text = f"{what}: slots of the host"
    yield line(text, [0 if state.growing else state.pool.capacity], "", at_least=1, is_check=True)


def _decoding(rider: Rider, prompts: Sequence[Sequence[int]]) -> float:
    """Return the seconds of a step in which all decode."""
    first, seconds = rider.serve(prompts, TOKENS)
    return (seconds - max(first)) / (TOKENS - 1)


def _cached_tokens(rider: Rider, prompts: Sequence[Sequence[int]]) -> int:
    rider.ask(prompts, 1)
    found: dict[str, int] = {}
    while rider.is_busy:
        rider.step()
        found |= {output.request_id: output.num_cached_tokens for output in rider.outputs}
    return sum(found.values())


def _prompts(draw: random.Random) -> list[list[int]]:
    return [_prompt(draw) for _ in range(RUNNING)]


def _prompt(draw: random.Random) -> list[int]:
    return draw.choices(range(2, VOCABULARY), k=PROMPT_TOKENS)


def main() -> None:
    """Print the lines as JSON, on one line."""
    import torch

    host_bytes, on_gpu = int(sys.argv[1]), torch.cuda.is_available()
    what = f"vLLM with host_bytes {host_bytes / 2**30:g}GiB"
    prepare_process(on_gpu)
    if on_gpu:
        found = list(measure(what, host_bytes, _SHAPE, _ON_GPU))
    else:
        found = [not_run(what, "torch sees no GPU")]
    sys.stdout.write("\n" + json.dumps([one.to_plain() for one in found]) + "\n")


if __name__ == "__main__":
    main()
