"""Compares a lookup to a bare loop of dict lookups over the same keys.

Each sample is a new request whose keys are all on the host. The bare loop, the search and the whole hook look up
the same keys, in alternating order. The hook also pins the slots and updates counters and journal. A miss is a
lookup whose first key is not on the host.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvoffload.core.match import longest_match
from kvoffload.model.ids import BlockKey, RequestId, SlotId
from tests.bench.engineless import BLOCK_TOKENS, Engineless, fresh_keys
from tests.bench.lines import Line, line, ratios

_PROMPTS = 32  # so many that a prompt's keys have left the processor's caches when the prompt returns
_WARM_UP = 5


def measure(blocks: Sequence[int], samples: int) -> Iterator[Line]:
    """Measure lookups that find N blocks, for each N in `blocks`, and lookups that miss."""
    for count in blocks:
        took = _times(count, samples)
        for name, what in (
            ("search", "the search behind a lookup"),
            ("hook", "the whole lookup, pins and counters"),
        ):
            what = f"{what}, {count:,} blocks"
            yield line(
                f"{what}, over a bare loop on the same keys", ratios(took[name], took["bare"]), at_most=4
            )
            yield line(what, took[name], " us")
    took = _times(0, samples)
    yield line("the search behind a lookup, a miss", took["search"], " us", at_most=2)
    yield line("the whole lookup, a miss", took["hook"], " us", at_most=8)


def _times(blocks: int, samples: int) -> dict[str, list[float]]:
    """Return the samples of each method ("bare", "search" and "hook") in microseconds."""
    draw = random.Random(blocks)
    rig = Engineless(_PROMPTS * max(blocks, 1) + 4096)
    prompts = [_stored(rig, draw, blocks) for _ in range(_PROMPTS)]
    times: dict[str, list[float]] = {"bare": [], "search": [], "hook": []}
    plain = dict(rig.side.core.state.pool.index)
    gc.collect()
    gc.disable()
    try:
        for sample in range(samples + _WARM_UP):
            keys = prompts[sample % _PROMPTS]
            request = rig.seen(str(sample), keys)
            ways = _ways(rig, plain, request, keys, blocks)
            order = list(ways) if sample % 2 else list(reversed(ways))
            took = {name: _timed(ways[name]) for name in order}
            rig.ended(request)
            if sample >= _WARM_UP:
                for name, seconds in took.items():
                    times[name].append(1e6 * seconds)
    finally:
        gc.enable()
    return times


def _ways(
    rig: Engineless,
    plain: Mapping[BlockKey, SlotId],
    request: RequestId,
    keys: Sequence[BlockKey],
    found: int,
) -> dict[str, Callable[[], object]]:
    shape, index = rig.side.shape, rig.side.core.state.pool.index
    limit, per_group = len(keys) * BLOCK_TOKENS, (keys,)

    def bare() -> None:
        get = plain.get
        for key in keys:
            if get(key) is None:
                break

    def hook() -> None:
        assert rig.side.lookup(request, 0) == found * BLOCK_TOKENS

    return {"bare": bare, "search": lambda: longest_match(shape, per_group, index, 0, limit), "hook": hook}


def _stored(rig: Engineless, draw: random.Random, blocks: int) -> list[BlockKey]:
    """Store a prompt of `blocks` blocks on the host, and return its keys. For 0 blocks, return missing keys."""
    if not blocks:
        return fresh_keys(draw, 64)
    keys = fresh_keys(draw, blocks)
    rig.put(keys)
    return keys


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun
