"""Whether requests that do nothing in a step cost the step anything.

Two sides of the same size, one with few requests that run and do nothing, one with many, take turns: a window of steps
each, of which the first alternates. Python's garbage collector rests meanwhile, as engines freeze what it would visit.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvoffload.bench.lines import Line, line, ratios
from kvoffload.bench.scale.engineless import BLOCK_TOKENS, Engineless, fresh_keys
from kvoffload.model.ids import BlockKey

FEW = 10
BLOCKS = 8  # of the prompt of a request that comes, is computed, stored, and goes
_STEPS = 100
_SERVED = 10
_SLOTS = 4096


def measure(tracked: Sequence[int], pairs: int) -> Iterator[Line]:
    """Measure with each number of idle requests."""
    for count in tracked:
        few, many = _holding(FEW, count), _holding(count, count)
        draw = random.Random(count)
        for name, work in _WORKS.items():
            times: dict[Engineless, list[float]] = {few: [], many: []}
            with resting_collector():
                for pair in range(pairs + 1):
                    # Made before the window, so that making them is not in it.
                    prompts = [fresh_keys(draw, BLOCKS) for _ in range(_SERVED)]
                    for rig in (few, many) if pair % 2 else (many, few):
                        took = _window(rig, work, pair, prompts)
                        if pair:  # the first warms up
                            times[rig].append(took)
            what = f"hooks per step with {count:,} requests that do nothing: {name}"
            yield line(f"{what}, over {FEW}", ratios(times[many], times[few]), at_most=1.1)
            yield line(what, times[many], " us")


def _holding(requests: int, room_for: int) -> Engineless:
    """Return a side on which `requests` requests run, with everything stored that can be."""
    draw = random.Random(0)
    rig = Engineless(_SLOTS + 2 * room_for, device_blocks=4 * room_for + 4096)
    for number in range(requests):
        rig.hold(f"idle {number}", fresh_keys(draw, 2))
    rig.drain()
    return rig


Work = Callable[[Engineless, int, Sequence[Sequence[BlockKey]]], None]


def _nothing(rig: Engineless, window: int, prompts: Sequence[Sequence[BlockKey]]) -> None:
    """Steps in which no request completes a block: most of them."""
    for _ in range(_STEPS):
        rig.step(decode_tokens=FEW)


def _serving(rig: Engineless, window: int, prompts: Sequence[Sequence[BlockKey]]) -> None:
    """Requests that are looked up, computed, stored and end, one after the other."""
    for number, keys in enumerate(prompts):
        request = rig.seen(f"{window} {number}", keys)
        rig.lookup(request)
        table = rig.allocated(request, BLOCKS + 1, 0)
        rig.computed(table, keys)
        rig.step([(request, BLOCKS * BLOCK_TOKENS)])
        rig.step()
        rig.ended(request, BLOCKS * BLOCK_TOKENS, table)


_WORKS: dict[str, Work] = {"nothing happens": _nothing, "a request comes and goes": _serving}


def _window(rig: Engineless, work: Work, number: int, prompts: Sequence[Sequence[BlockKey]]) -> float:
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
