"""Whether requests that do nothing in a step cost the step anything.

Two sides of the same size, one with few requests that run and do nothing, one with many, take turns: a window of steps
each, of which the first alternates. Python's garbage collector rests meanwhile, as engines freeze what it would visit.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.bench.scale.engineless import BLOCK_TOKENS, Engineless, fresh_keys
from kvoffload.bench.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW = 10
TARGET = 1.1
BLOCKS = 8  # of the prompt of a request that comes, is computed, stored, and goes
_STEPS = 100
_SERVED = 10
_SLOTS = 4096
_DRAWN = 64  # keys of so many requests are made before the window, so that making them is not in it


@dataclass(frozen=True, slots=True)
class Idle:
    """One number of idle requests, one kind of step.

    Args:
        tracked: requests that do nothing.
        work: what goes on beside them.
        few_us, many_us: in hooks per step, with `FEW` and with `tracked`.
        growth: of the pairs, with `tracked` over with `FEW`.
    """

    tracked: int
    work: str
    few_us: Spread
    many_us: Spread
    growth: Spread

    def to_plain(self) -> dict[str, object]:
        """The fields, for JSON."""
        spreads = {name: getattr(self, name).to_plain() for name in ("few_us", "many_us", "growth")}
        return {"tracked": self.tracked, "work": self.work, **spreads}


def measure(tracked: Sequence[int], pairs: int) -> list[Idle]:
    """Measure with each number of idle requests."""
    return [case for count in tracked for case in _measure(count, pairs)]


def _measure(tracked: int, pairs: int) -> Iterator[Idle]:
    few, many = _holding(FEW, tracked), _holding(tracked, tracked)
    draw = random.Random(tracked)
    for name, work in _WORKS.items():
        times: dict[Engineless, list[float]] = {few: [], many: []}
        with resting_collector():
            for pair in range(pairs + 1):
                prompts = [fresh_keys(draw, BLOCKS) for _ in range(_SERVED)]
                for rig in (few, many) if pair % 2 else (many, few):
                    took = _window(rig, work, pair, prompts)
                    if pair:  # the first warms up
                        times[rig].append(took)
        ratios = [long / short for short, long in zip(times[few], times[many], strict=True)]
        yield Idle(tracked, name, Spread.of(times[few]), Spread.of(times[many]), Spread.of(ratios))


def _holding(requests: int, room_for: int) -> Engineless:
    """A side on which so many requests run; all that can be stored of them has been."""
    draw = random.Random(0)
    rig = Engineless(_SLOTS + 2 * room_for, device_blocks=4 * room_for + 4096)
    for number in range(requests):
        rig.hold(f"idle {number}", fresh_keys(draw, 2))
    rig.drain()
    return rig


Work = Callable[[Engineless, int, "Sequence[Sequence[bytes]]"], None]


def _nothing(rig: Engineless, window: int, prompts: Sequence[Sequence[bytes]]) -> None:
    """Steps in which nobody completes a block: most of them."""
    for _ in range(_STEPS):
        rig.step(decode_tokens=FEW)


def _serving(rig: Engineless, window: int, prompts: Sequence[Sequence[bytes]]) -> None:
    """Requests that are looked up, computed, stored and end, one after the other."""
    for number, keys in enumerate(prompts):
        request = rig.seen(f"{window} {number}", keys)  # type: ignore[arg-type]  # keys are bytes
        rig.lookup(request)
        table = rig.allocated(request, BLOCKS + 1, 0)
        rig.computed(table, keys)  # type: ignore[arg-type]
        rig.step([(request, BLOCKS * BLOCK_TOKENS)])
        rig.step()
        rig.ended(request, BLOCKS * BLOCK_TOKENS, table)


_WORKS: dict[str, Work] = {"nothing happens": _nothing, "a request comes and goes": _serving}


def _window(rig: Engineless, work: Work, number: int, prompts: Sequence[Sequence[bytes]]) -> float:
    """Return the microseconds in hooks per step of a window."""
    begun, steps = rig.hook_s, rig.steps
    work(rig, number, prompts)
    return 1e6 * (rig.hook_s - begun) / (rig.steps - steps)


@contextmanager
def resting_collector() -> Iterator[None]:
    """Collect once, and then not until the end."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
