"""What offloading costs where it cannot help: throughput on prompts that never repeat, with over without.

Both engines serve the same prompts, one right after the other, and which one goes first alternates: what else the
machine does in these seconds meets both alike. The median of the pairs' ratios is judged, with an interval that assumes
nothing about their distribution. An engine's time ends when it has nothing left to do, open copies included.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvoffload.cli.demo.intervals import median_interval
from kvoffload.engine import SamplingParams

if TYPE_CHECKING:
    from kvoffload.engine import Engine

TOLERANCE = 0.02
_IDLE_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class NoReuseSettings:
    """How much is measured.

    Args:
        pairs: measurements of each engine.
        prompts: in each measurement, all at once.
        prompt_tokens: of each prompt.
        answer_tokens: generated for each.
        seed: of the prompts.
    """

    pairs: int = 20
    prompts: int = 2
    prompt_tokens: int = 1024
    answer_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Prompt and new tokens per second of both engines on the same prompts."""

    plain: float
    offloaded: float

    @property
    def ratio(self) -> float:
        """Throughput with offloading over throughput without."""
        return self.offloaded / self.plain


@dataclass(frozen=True, slots=True)
class NoReuse:
    """What was measured.

    Args:
        pairs: every measurement.
        ratio: median of the pairs' ratios.
        low, high: its 95 % interval.
        tolerance: how far below 1 it may be.
    """

    pairs: tuple[Pair, ...]
    ratio: float
    low: float
    high: float
    tolerance: float = TOLERANCE

    @classmethod
    def of(cls, pairs: list[Pair]) -> NoReuse:
        """Judge at least one pair."""
        ratios = [pair.ratio for pair in pairs]
        return cls(tuple(pairs), statistics.median(ratios), *median_interval(ratios))

    @property
    def passed(self) -> bool:
        """False only if the whole interval is too slow, so that noise alone fails nobody.

        Too fast is no failure: on a machine short of cores, a process with one thread more gets a larger share of them.
        """
        return self.high >= 1 - self.tolerance

    @property
    def plain_median(self) -> float:
        return statistics.median(pair.plain for pair in self.pairs)

    @property
    def offloaded_median(self) -> float:
        return statistics.median(pair.offloaded for pair in self.pairs)

    def to_plain(self) -> dict[str, object]:
        """The fields and `passed`, for JSON."""
        return {"passed": self.passed, **asdict(self)}


async def measure(
    plain: Engine,
    offloaded: Engine,
    settings: NoReuseSettings,
    told: Callable[[int], object] = lambda _: None,
) -> NoReuse:
    """Measure both engines, which run and are otherwise alike; `told` hears of each pair's number."""
    draw = random.Random(settings.seed)
    pairs = []
    for number in range(settings.pairs + 1):
        prompts = [_prompt(draw, plain, settings.prompt_tokens) for _ in range(settings.prompts)]
        order = (plain, offloaded) if number % 2 else (offloaded, plain)
        rates = {engine: await _throughput(engine, prompts, settings.answer_tokens) for engine in order}
        if number:  # pair 0 warms both up
            pairs.append(Pair(rates[plain], rates[offloaded]))
            told(number)
    return NoReuse.of(pairs)


def _prompt(draw: random.Random, engine: Engine, tokens: int) -> list[int]:
    """Random tokens: no two prompts share even their first block."""
    return draw.choices(range(engine.config.model.vocab_size), k=tokens)


async def _throughput(engine: Engine, prompts: list[list[int]], answer_tokens: int) -> float:
    clock = asyncio.get_running_loop().time
    begun = clock()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(_serve(engine, prompt, answer_tokens))
    while engine.has_work:  # noqa: ASYNC110  # the engine has no event for it
        await asyncio.sleep(_IDLE_POLL_S)
    return sum(len(prompt) + answer_tokens for prompt in prompts) / (clock() - begun)


async def _serve(engine: Engine, prompt: list[int], answer_tokens: int) -> None:
    async with engine.submit(prompt, SamplingParams(answer_tokens)) as stream:
        async for _ in stream:
            pass
