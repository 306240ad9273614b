"""What offloading costs where it cannot help: throughput on prompts that never repeat, with over without.

Both engines serve the same prompts, one right after the other, and which one goes first alternates: what else the
machine does in these seconds affects both. An engine's time ends when it has nothing left to do, open copies included.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, NamedTuple

from kvoffload.cli.demo.play import idle
from kvoffload.engine import SamplingParams

if TYPE_CHECKING:
    from kvoffload.engine import Engine


class Rates(NamedTuple):
    """Prompt and new tokens per second of both engines on the same prompts."""

    plain: float
    offloaded: float


async def measure(
    plain: Engine,
    offloaded: Engine,
    pairs: int,
    prompt_tokens: int,
    answer_tokens: int = 16,
    prompts: int = 2,
) -> list[Rates]:
    """Measure both engines, which differ in offloading only, with this many prompts at once."""
    draw = random.Random(0)
    found = []
    for number in range(pairs + 1):
        vocabulary = range(plain.config.model.vocab_size)
        # Random tokens: no two prompts share even their first block.
        asked = [draw.choices(vocabulary, k=prompt_tokens) for _ in range(prompts)]
        order = (plain, offloaded) if number % 2 else (offloaded, plain)
        rates = {engine: await _throughput(engine, asked, answer_tokens) for engine in order}
        if number:  # pair 0 warms both up
            found.append(Rates(rates[plain], rates[offloaded]))
    return found


async def _throughput(engine: Engine, prompts: list[list[int]], answer_tokens: int) -> float:
    clock = asyncio.get_running_loop().time
    begun = clock()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(_serve(engine, prompt, answer_tokens))
    await idle(engine)
    return sum(len(prompt) + answer_tokens for prompt in prompts) / (clock() - begun)


async def _serve(engine: Engine, prompt: list[int], answer_tokens: int) -> None:
    async with engine.submit(prompt, SamplingParams(answer_tokens)) as stream:
        async for _ in stream:
            pass
