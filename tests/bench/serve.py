"""Measures what offloading costs and gains in a stock vLLM, compared with vLLM's `SimpleCPUOffloadConnector`.

Three engines run in one process: without a connector, with our connector, and with the peer. They take turns
with the same prompts, so that other load on the machine affects all of them.

* Prompts that never repeat: the throughput, relative to the engine without a connector. An engine's time
  includes its copies.
* Returning turns: the conversations need four times the device's cache, so the device has evicted each
  conversation before its next turn. The time to first token is compared with recomputing and with the peer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from kvoffload.checks.options import positive
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out
from tests.bench.vllm_engines import (
    BLOCK,
    HOST_BYTES_ON_GPU,
    NATIVE,
    OURS,
    PEER,
    VOCABULARY,
    Rider,
    find_connectors,
    kv_transfer,
    open_riders,
    require_vllm,
)

PLAIN = "plain"
AT_ONCE = 2
TURNS = 3
_CACHE_SHARE = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the sizes of its prompts.

    Args:
        model: a description of the model.
        shape: entries of the model's configuration.
        prompt_tokens: the number of tokens in a conversation's first prompt.
        turn_tokens: the number of tokens that each turn adds to the prompt.
        options: vLLM's options.
    """

    model: str
    shape: Mapping[str, Any]
    prompt_tokens: int
    turn_tokens: int
    options: Mapping[str, Any]


ON_CPU = Workload(
    "a tiny Qwen3",
    {  # so large that computing a prompt takes longer than scheduling the request
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 4,
    },
    1024,
    64,
    {"kv_cache_memory_bytes": 1 << 30},
)
ON_GPU = Workload(
    "the shape of Qwen3-8B",
    {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "max_position_embeddings": 40960,
    },
    8192,
    256,
    {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.2,  # per engine, of which there are up to four
        "kv_cache_memory_bytes": 8 << 30,
    },
)

_WHOSE = {OURS: "with", PEER: "with vLLM's own connector", NATIVE: "with vLLM's OffloadingConnector"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=positive, default=20, help="repeats of prompts that never repeat")
    parser.add_argument("--conversations", type=positive, default=12, help="whose turns come back")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    require_vllm()
    connectors, note = find_connectors()
    work = ON_CPU
    if torch.cuda.is_available():
        work = ON_GPU
        connectors[NATIVE] = kv_transfer("OffloadingConnector", cpu_bytes_to_use=HOST_BYTES_ON_GPU)
    method = (
        f"{work.model}; {args.pairs} repeats of {AT_ONCE} prompts of {work.prompt_tokens} tokens, {args.conversations} "
        f"conversations of {TURNS} turns; engines in turns in one process; medians of the pairs' ratios "
        f"[95 % interval]; peer: {note}"
    )
    lines = _measure(work, connectors, args.pairs, args.conversations)
    return give_out("serve", args, method, lines, "vllm")


def _measure(
    work: Workload, connectors: Mapping[str, Mapping[str, Any]], pairs: int, conversations: int
) -> Iterator[Line]:
    longest = work.prompt_tokens + TURNS * work.turn_tokens
    needed = conversations * (longest // BLOCK)
    # The last 1 is the null block, which no request can use.
    blocks = max(needed // _CACHE_SHARE, AT_ONCE * (longest // BLOCK + 1)) + 1
    options = {"num_gpu_blocks_override": blocks, "max_model_len": longest, **work.options}
    draw = random.Random(0)
    with open_riders("qwen3", {PLAIN: None, **connectors}, AT_ONCE, work.shape, **options) as riders:
        rates = _never_repeating(work, riders, pairs, draw)
        first_ms = _returning(work, riders, conversations, draw)
    vllm = f"vLLM {version('vllm')}"
    yield from _throughput(rates, vllm)
    yield from _first_tokens(first_ms, f"{vllm}, working set {needed / (blocks - 1):.0f} times the cache")


def _throughput(rates: Mapping[str, Sequence[float]], vllm: str) -> Iterator[Line]:
    """Yield the lines for prompts that never repeat, from each connector's tokens per second."""
    what = f"throughput on prompts that never repeat, {vllm}"
    for name, found in rates.items():
        if name != PLAIN:
            target = 0.99 if name == OURS else None
            yield line(f"{what}, {_WHOSE[name]} over none", ratios(found, rates[PLAIN]), at_least=target)
    yield line(f"{what}, without a connector", rates[PLAIN], " tokens/s")


def _first_tokens(first_ms: Mapping[str, Sequence[float]], working_set: str) -> Iterator[Line]:
    """Yield the lines for returning turns, from each connector's times to first token in milliseconds."""
    first = f"first token of returning turns, {working_set}"
    for name, found in first_ms.items():
        if name != PLAIN:
            sooner, target = ratios(first_ms[PLAIN], found), 3 if name == OURS else None
            yield line(f"{first}: {_WHOSE[name]}, sooner than recomputed", sooner, at_least=target)
    sooner = ratios(first_ms[PEER], first_ms[OURS])
    yield line(f"{first}: sooner than vLLM's own connector", sooner, at_least=1)
    yield line(f"{first}: with", first_ms[OURS], " ms")
    yield line(f"{first}: recomputed", first_ms[PLAIN], " ms")


def _never_repeating(
    work: Workload, riders: Sequence[Rider], pairs: int, draw: random.Random
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {rider.name: [] for rider in riders}
    for repeat in range(pairs + 1):
        prompts = [_tokens(draw, work.prompt_tokens) for _ in range(AT_ONCE)]
        for rider in _in_turns(riders, repeat):
            seconds = rider.serve(prompts, work.turn_tokens)[1]
            if repeat:  # The first repeat is a warm-up.
                rates[rider.name].append(AT_ONCE * (work.prompt_tokens + work.turn_tokens) / seconds)
    return rates


def _returning(
    work: Workload, riders: Sequence[Rider], conversations: int, draw: random.Random
) -> dict[str, list[float]]:
    """Play all conversations round by round. Return the returning turns' times to first token in milliseconds."""
    first_ms: dict[str, list[float]] = {rider.name: [] for rider in riders}
    prompts = [_tokens(draw, work.prompt_tokens) for _ in range(conversations)]
    for turn in range(TURNS):
        for start in range(0, conversations, AT_ONCE):
            asked = prompts[start : start + AT_ONCE]
            for rider in _in_turns(riders, turn + start // AT_ONCE):
                times = rider.serve(asked, work.turn_tokens // 4)[0]
                if turn:
                    first_ms[rider.name] += [1e3 * one for one in times]
        prompts = [prompt + _tokens(draw, work.turn_tokens) for prompt in prompts]
    return first_ms


def _in_turns(riders: Sequence[Rider], number: int) -> Sequence[Rider]:
    first = number % len(riders)
    return [*riders[first:], *riders[:first]]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(2, VOCABULARY), k=count)
