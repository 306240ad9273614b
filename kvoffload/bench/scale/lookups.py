"""What a lookup takes, against a bare loop of dict lookups over the same keys.

Each sample is a new request with keys of its own, all on the host; the bare loop, the search alone and the whole hook
take turns on them. The hook pins what it found and tells its counters and journal; the loop does nothing with what it
finds. A miss is a lookup whose first key is not there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvoffload.bench.scale.engineless import BLOCK_TOKENS, Engineless, fresh_keys
from kvoffload.bench.scale.idle import resting_collector
from kvoffload.bench.spread import Spread
from kvoffload.core.match import longest_match
from kvoffload.model.ids import BlockKey, RequestId, SlotId

TARGET = 4.0
MISS_TARGET_US = 2.0
_PROMPTS = 32  # of which every sample takes the next, so that keys are not in a cache from the last sample
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Lookup:
    """One length of prompt.

    Args:
        blocks: looked up, all of them found; 0 for the miss.
        bare_us: of the bare loop.
        search_us: of the search for the longest usable prefix.
        hook_us: of the whole hook.
        search_ratio, hook_ratio: over the bare loop on the same keys; None for the miss.
    """

    blocks: int
    bare_us: Spread
    search_us: Spread
    hook_us: Spread
    search_ratio: Spread | None
    hook_ratio: Spread | None

    def to_plain(self) -> dict[str, object]:
        """The fields, for JSON."""
        names = ("bare_us", "search_us", "hook_us", "search_ratio", "hook_ratio")
        spreads = {name: getattr(self, name) for name in names}
        return {"blocks": self.blocks, **{name: one and one.to_plain() for name, one in spreads.items()}}


def measure(blocks: Sequence[int], samples: int) -> list[Lookup]:
    """Measure prompts of so many blocks each, and a miss on a prompt of the first length."""
    with resting_collector():
        return [*(_measure(count, samples) for count in blocks), _measure(0, samples)]


def _measure(blocks: int, samples: int) -> Lookup:
    draw = random.Random(blocks)
    rig = Engineless(_PROMPTS * max(blocks, 1) + 4096)
    prompts = [_stored(rig, draw, blocks) for _ in range(_PROMPTS)]
    times: dict[str, list[float]] = {"bare": [], "search": [], "hook": []}
    plain = dict(rig.side.core.state.pool.index)
    for sample in range(samples + _WARM_UP):
        keys = prompts[sample % _PROMPTS]
        request = rig.seen(str(sample), keys)
        ways = _ways(rig, plain, request, keys, blocks)
        order = list(ways) if sample % 2 else list(reversed(ways))
        took = {name: _timed(ways[name]) for name in order}
        rig.ended(request, 0, ())
        if sample >= _WARM_UP:
            for name, seconds in took.items():
                times[name].append(1e6 * seconds)
    spreads = {name: Spread.of(found) for name, found in times.items()}
    ratios = {name: _ratio(times[name], times["bare"]) if blocks else None for name in ("search", "hook")}
    return Lookup(
        blocks, spreads["bare"], spreads["search"], spreads["hook"], ratios["search"], ratios["hook"]
    )


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
    """Return a prompt's keys, on the host where there are any; for 0 a prompt that is not."""
    if not blocks:
        return fresh_keys(draw, 64)
    keys = fresh_keys(draw, blocks)
    rig.put(keys)
    return keys


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _ratio(times: Sequence[float], bare: Sequence[float]) -> Spread:
    return Spread.of([mine / loop for mine, loop in zip(times, bare, strict=True)])
