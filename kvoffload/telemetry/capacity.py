"""Predicts which share of prompt tokens a host, or a disk below it, of another size would find.

Hooks only append facts to a bounded queue, by a method in C. `Predictions` in `runtime` passes them on from the portal's
loop, about once a second, so that the engine's thread never wakes another thread for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvoffload.bus.bus import Bus
from kvoffload.model import facts
from kvoffload.model.config import OffloadConfig
from kvoffload.model.engine import EngineShape
from kvoffload.model.events import MetricsSampled
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.wire import Tier
from kvoffload.telemetry.catalogue import (
    BY_NAME,
    CAPACITIES,
    CATALOGUE,
    Labels,
    Series,
    Side,
    TierSizes,
    read_all,
)
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.policies import PolicyChoice
from kvoffload.telemetry.reuse import ReuseCurve

_HOST, _DISK = TierSizes.HOST.value, TierSizes.HOST_AND_DISK.value
_WAITING = 1024  # the maximum number of facts in the queue, a few seconds of a busy engine
_MOST_REQUESTS = 4096
_DAY_S = 86_400.0
_GIB = 2**30


class Sizes(NamedTuple):
    """The sizes of an engine's tiers. `disk_slots` is 0 without a disk; `slot_bytes` is 0 until every rank reported.

    `policy` is the store policy in use; `policies` are those that `auto` may choose.
    """

    host_slots: int
    disk_slots: int
    slot_bytes: int
    policy: str = "eager"
    policies: tuple[str, ...] = ("eager",)


class CapacityCurve:
    """What tiers of other sizes would have found since the engine's start; each day counts twice as much as the last.

    One thread may call `take` and `measure`, any thread may read `series`.

    Args:
        shape: the engine's fixed properties.
        config: the operator's settings.
        sizes: returns the tiers' sizes.
        now: returns the monotonic time in seconds.

    Attributes:
        series: the series of the metrics about other sizes, by the metric's name; empty at first.
        choice: compares the store policies that are allowed at the start; None if there is only one.
    """

    def __init__(
        self,
        shape: EngineShape,
        config: OffloadConfig,
        sizes: Callable[[], Sizes],
        now: Callable[[], float],
    ) -> None:
        full = [group for group in shape.groups if group.kind is AttentionKind.FULL]
        group = (full or shape.groups)[0]
        self._group = group.group
        self._block_tokens = group.block_tokens
        # Blocks of the other groups for the same tokens are stored and evicted with this group's.
        self._slots_per_block = sum(map(self._blocks_beside, shape.groups)) or 1.0
        self._device_slots = shape.device_blocks
        self._sizes = sizes
        self._now = now
        self._inbox: deque[facts.Fact] = deque(maxlen=_WAITING)
        self._curve = ReuseCurve(tuple(CAPACITIES), disk_takes_all=not config.disk_min_hits)
        policies = sizes().policies
        self.choice = PolicyChoice(policies) if len(policies) > 1 else None
        # For each request, the time of its blocks' use, how many keys it has, and its blocks in the sample of `choice`.
        self._requests: dict[RequestId, tuple[int, int, list[int]]] = {}
        self._prompt_tokens = self._seconds = 0.0
        self._measured = now()
        self.series: Mapping[str, Series] = {}

    def subscribe(self, bus: Bus) -> None:
        """Start to collect the bus's facts."""
        for cls in (facts.RequestSeen, facts.StepScheduled, facts.RequestEnded, facts.CacheReset):
            bus.count(cls, self._inbox.append)

    def take(self, most: int = 16) -> bool:
        """Handle up to `most` of the collected facts; return whether there may be more."""
        sizes = self._sizes()
        self._set_sizes(sizes)
        for _ in range(most):
            try:
                fact = self._inbox.popleft()
            except IndexError:
                return False
            self._handle(fact)
            if self.choice is not None:
                self.choice.decide(sizes.policy, sizes.policies)
        return True

    def measure(self) -> None:
        """Compute `series` from the facts that were handled."""
        self._age()
        sizes, curve = self._sizes(), self._curve
        share = self._block_tokens / max(self._prompt_tokens, 1.0)
        host = self._on_host(sizes.host_slots)
        found: dict[Labels, float] = {}
        unknown: dict[Labels, float] = {}
        for name, times in CAPACITIES.items():
            capacity = self._on_host(times * sizes.host_slots)
            for tiers, blocks, hits in (
                (_HOST, capacity, curve.host_hits(capacity)),
                (_DISK, host + curve.disks[name].capacity, curve.disk_hits(name)),
            ):
                found[tiers, name] = hits * share
                unknown[tiers, name] = curve.unknown(blocks, hits) * share
        seconds = max(self._seconds, 1.0)
        by_policy = self.choice.found() if self.choice is not None else {}
        self.series = {
            "kvoffload_predicted_hit_tokens_ratio": found,
            "kvoffload_predicted_unknown_ratio": unknown,
            "kvoffload_predicted_margin_ratio": {(): curve.margin},
            "kvoffload_predicted_seconds": {(): self._seconds},
            "kvoffload_predicted_prompt_tokens_per_second": {(): self._prompt_tokens / seconds},
            "kvoffload_next_gib_tokens_per_second": {
                (tiers,): hits * self._block_tokens / seconds
                for tiers, hits in self._next_gib_hits(sizes).items()
            },
            "kvoffload_predicted_policy_hit_ratio": {(policy,): share for policy, share in by_policy.items()},
        }

    def _next_gib_hits(self, sizes: Sizes) -> dict[str, float]:
        """Return how many more lookups the next GiB of the host, or of a disk, would have found."""
        curve, slots = self._curve, _GIB / sizes.slot_bytes if sizes.slot_bytes else 0.0
        host = curve.host_hits(self._on_host(sizes.host_slots))
        more = curve.host_hits(self._on_host(sizes.host_slots + slots))
        # Between two capacities of a disk, the hits are taken to grow evenly.
        capacities = [0.0, *(disk.capacity for disk in curve.disks.values())]
        hits = [host, *map(curve.disk_hits, curve.disks)]
        disk = [self._blocks(sizes.disk_slots), self._blocks(sizes.disk_slots + slots)]
        today, next_gib = np.interp(disk, capacities, hits)
        return {_HOST: more - host, _DISK: float(next_gib - today)}

    def _age(self) -> None:
        """Add the time since the last call, and halve everything that was counted once a day."""
        now = self._now()
        self._seconds += now - self._measured
        self._measured = now
        if self._seconds > _DAY_S:
            self._curve.halve()
            self._prompt_tokens /= 2
            self._seconds /= 2

    def _handle(self, fact: facts.Fact) -> None:
        match fact:
            case facts.RequestSeen():
                self._seen(fact)
            case facts.StepScheduled():
                for one in fact.progress:
                    self._grown(one.request, one.new_keys)
            case facts.RequestEnded():
                self._grown(fact.request, fact.new_keys)
                self._requests.pop(fact.request, None)
            case _:
                self._curve.forget()
                if self.choice is not None:
                    self.choice.forget()

    def _seen(self, fact: facts.RequestSeen) -> None:
        keys = fact.keys[self._group]
        # At least one token of a prompt is computed. A request that opted out uses its blocks, but looks none up.
        asked = min((fact.prompt_tokens - 1) // self._block_tokens, len(keys)) if fact.reads_cache else 0
        self._prompt_tokens += fact.prompt_tokens if fact.reads_cache else 0
        blocks = self.choice.request(keys, asked) if self.choice is not None else []
        self._requests[fact.request] = self._curve.request(keys, asked), len(keys), blocks
        if len(self._requests) > _MOST_REQUESTS:  # the oldest may have ended with a fact that the queue lost
            del self._requests[next(iter(self._requests))]

    def _grown(self, request: RequestId, new_keys: Sequence[Sequence[BlockKey]]) -> None:
        """Add the blocks that a request has computed since it was seen, such as those of its answer."""
        if self._group < len(new_keys) and (keys := new_keys[self._group]) and request in self._requests:
            time, depth, blocks = self._requests[request]
            self._curve.grown(time, depth, keys)
            if self.choice is not None:
                self.choice.grown(blocks, keys)
            self._requests[request] = time, depth + len(keys), blocks

    def _set_sizes(self, sizes: Sizes) -> None:
        curve = self._curve
        curve.host = self._on_host(sizes.host_slots)
        curve.most_host = self._on_host(max(CAPACITIES.values()) * sizes.host_slots)
        for name, times in CAPACITIES.items():
            curve.disks[name].capacity = self._blocks(times * (sizes.disk_slots or sizes.host_slots))
        if self.choice is not None:
            self.choice.set_sizes(self._blocks(self._device_slots), self._blocks(sizes.host_slots))

    def _on_host(self, slots: float) -> float:
        """Return how many blocks a host with so many slots and the device have together.

        An eager host has the device's blocks too. A lazy host has some others, but hardly more: a block that it loads
        is then on both.
        """
        return self._blocks(max(slots, self._device_slots))

    def _blocks(self, slots: float) -> float:
        return slots / self._slots_per_block

    def _blocks_beside(self, group: GroupSpec) -> float:
        """Return how many of a group's blocks are stored for the tokens of one followed block."""
        is_state = group.kind is AttentionKind.RECURRENT  # only few states are stored
        return 0.0 if is_state else self._block_tokens / group.block_tokens


def sizes_of(side: Side) -> Sizes:
    disk = side.state.by_name.get(Tier.DISK)
    slot_bytes = sum(report.slot_bytes for report in side.reports.values())
    disk_slots = disk.capacity if disk is not None else 0
    return Sizes(side.state.pool.capacity, disk_slots, slot_bytes, side.core.store_policy, side.core.policies)


# -- for the journal ----------------------------------------------------------------------------------------------

WAITED = "kvoffload_load_wait_seconds_sum"
_ALSO_SAMPLED = (
    "kvoffload_capacity_slots",
    "kvoffload_host_bytes",
    "kvoffload_info",
    "kvoffload_interference_seconds_total",
    "kvoffload_prefill_seconds_saved_total",
    "kvoffload_prefill_tokens_per_second",
    "kvoffload_slot_bytes",
    "kvoffload_store_policy",
)
_SAMPLED = tuple(
    metric
    for metric in CATALOGUE
    if metric.name.startswith(("kvoffload_predicted_", "kvoffload_next_gib_")) or metric.name in _ALSO_SAMPLED
)


def sample(side: Side, counters: Counters, on_failure: Callable[[str, Exception], object]) -> MetricsSampled:
    """Return the metrics that `kvoffload advise` reads and that the journal's events do not increase."""
    values = {
        f"{name} {','.join(labels)}": float(value)
        for name, series in read_all(side, counters.tiers, on_failure, _SAMPLED).items()
        for labels, value in series.items()
    }
    waits = {f"{WAITED} {reason.value}": wait.total for reason, wait in counters.waits.items()}
    return MetricsSampled(values | waits)


def labels_of(key: str) -> tuple[str, dict[str, str]]:
    """Return the name and the labels of a metric, of a key of `MetricsSampled.values`."""
    name, _, joined = key.partition(" ")
    metric = BY_NAME.get(name.removesuffix("_sum"))
    names = metric.label_names if metric is not None else ()
    return name, dict(zip(names, joined.split(","), strict=False))
