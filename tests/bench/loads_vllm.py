"""Measures first tokens of stock vLLM engines with each value of `min_load_tokens`, for `make bench-loads ARGS=--vllm`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import torch

from tests.bench.lines import Line
from tests.bench.loads import POLICIES, first_tokens
from tests.bench.serve import ON_CPU
from tests.bench.vllm_engines import (
    BLOCK,
    HOST_BYTES,
    VOCABULARY,
    Rider,
    kv_transfer,
    open_riders,
    prepare_process,
    require_vllm,
)

_TEXTS = 12
_TEXT_TOKENS = (64, 512)
_NEW_TOKENS = 32
_ANSWER_TOKENS = 4
_RUNNING = 8
_RATE = 0.9
_PART = 25  # requests that an engine serves before the next engine's turn
METHOD = (
    f"stock vLLM, {ON_CPU.model}; {_TEXTS} texts of {_TEXT_TOKENS[0]} to {_TEXT_TOKENS[1]} tokens on the host, three of "
    f"four prompts begin with one; arrivals at {_RATE} of the rate of an engine that loads nothing; engines take turns "
    f"with {_PART} requests each, of which all turns but the first count"
)


def measure(requests: int, seed: int) -> Iterator[Line]:
    require_vllm()
    prepare_process(torch.cuda.is_available())
    draw = random.Random(seed)
    texts = [_tokens(draw, draw.randint(*_TEXT_TOKENS) // BLOCK * BLOCK) for _ in range(_TEXTS)]
    longest = _TEXT_TOKENS[1] + _NEW_TOKENS + _ANSWER_TOKENS
    options = {"num_gpu_blocks_override": 9 * longest // BLOCK, "max_model_len": longest, **ON_CPU.options}
    connectors = {
        policy: kv_transfer(
            "KVOffloadConnector",
            host_bytes=HOST_BYTES * 4,
            **({} if least is None else {"min_load_tokens": least}),
        )
        for policy, least in POLICIES.items()
    }
    first: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with open_riders("qwen3", connectors, _RUNNING, ON_CPU.shape, **options) as riders:
        for rider in riders:
            rider.serve(texts, _ANSWER_TOKENS)
        mean_s = _mean_s(riders[1], draw)
        for part in range(requests // _PART):
            prompts = [_prompt(draw, texts) for _ in range(_PART)]
            gaps = [draw.expovariate(_RATE / mean_s) for _ in prompts]
            for rider in (*riders[part % 3 :], *riders[: part % 3]):
                found = _serve(rider, prompts, gaps)
                if part:
                    first[rider.name] += found
    yield from first_tokens(f"stock vLLM, rate {_RATE}", first)


def _mean_s(rider: Rider, draw: random.Random) -> float:
    """Return the seconds that an engine that loads nothing takes for a prompt, of several that it has at once."""
    prompts = [_prompt(draw, ()) for _ in range(3 * _RUNNING)]
    return rider.serve(prompts, _ANSWER_TOKENS)[1] / len(prompts)


def _serve(rider: Rider, prompts: Sequence[list[int]], gaps: Sequence[float]) -> list[float]:
    """Ask each prompt at its time. Return the seconds from then to each first token."""
    at, due = time.perf_counter(), list[tuple[float, list[int]]]()
    for gap, prompt in zip(gaps, prompts, strict=True):
        at += gap
        due.append((at, prompt))
    asked: dict[str, float] = {}
    first: dict[str, float] = {}
    while due or rider.is_busy:
        while due and due[0][0] <= time.perf_counter():
            at, prompt = due.pop(0)
            asked[rider.ask([prompt], _ANSWER_TOKENS)[0]] = at
        if not rider.is_busy:
            time.sleep(max(due[0][0] - time.perf_counter(), 0))
            continue
        rider.step()
        now = time.perf_counter()
        for output in rider.outputs:
            first.setdefault(output.request_id, now - asked[output.request_id])
    return list(first.values())


def _prompt(draw: random.Random, texts: Sequence[list[int]]) -> list[int]:
    is_known = bool(texts) and draw.random() < 0.75
    text = draw.choice(texts) if is_known else _tokens(draw, draw.randint(*_TEXT_TOKENS) // BLOCK * BLOCK)
    return text + _tokens(draw, _NEW_TOKENS)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(2, VOCABULARY), k=count)
