"""Declares all metrics. `CATALOGUE` has each metric's name, help text, kind and labels, and the source of the values.

The source is a function that reads the engine's state, or a set of events. The exporters, dashboards/metrics.md and the
dashboards' tests use the catalogue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvoffload.core.machine import JobState, SlotState
from kvoffload.disk.system import round_up
from kvoffload.model import events
from kvoffload.model.causes import (
    Adoption,
    CopyOutcome,
    Deferral,
    DegradeCause,
    EvictionCause,
    LoadOutcome,
    MissCause,
    NodeLoss,
    PinDropCause,
    RejectionCause,
    RemoteFault,
    StoreOutcome,
    TierOutcome,
)
from kvoffload.model.wire import LOWER_TIERS, SLOT_TIERS, Direction, Tier

if TYPE_CHECKING:
    from kvoffload.bus.bus import Bus
    from kvoffload.core.host import HostState
    from kvoffload.core.offload_core import OffloadCore
    from kvoffload.core.slots import SlotPool
    from kvoffload.core.tiers import LowerTier
    from kvoffload.model.ids import Rank
    from kvoffload.model.wire import TransferReport

Labels = tuple[str, ...]
Series = Mapping[Labels, float]
"""The values of a metric, by the values of its labels."""

# -- label values that only metrics use; `kvoffload.model` and `kvoffload.core.machine` have all others -----------


class LookupResult(Enum):
    """The result of a lookup for one block of a prompt."""

    HIT = "hit"
    MISS = "miss"
    OPTED_OUT = "opted_out"  # the request asked not to read cached blocks, so the block was not looked up


class HostBytes(Enum):
    """The amounts of host memory that the metrics report. WANTED includes RESERVED, and RESERVED includes USED."""

    WANTED = "wanted"  # the size in the settings
    RESERVED = "reserved"  # the memory that is already pinned
    USED = "used"  # the pinned memory that contains blocks, or that a copy is filling


class Part(Enum):
    """The parts of a tier's capacity that the metrics report."""

    TOTAL = "total"
    FREE = "free"  # slots without a block


class TierSizes(Enum):
    """The tiers whose size a prediction varies."""

    HOST = "host"
    HOST_AND_DISK = "host_and_disk"  # the size of a disk below today's host


CAPACITIES: Mapping[str, float] = {
    "0.25x": 0.25, "0.5x": 0.5, "1x": 1.0, "2x": 2.0, "4x": 4.0, "8x": 8.0,
}  # fmt: skip
"""For each capacity of a prediction, by its label's value, the multiple of today's capacity."""


POLICIES = ("eager", "twice", "lazy")
"""The store policies that `auto` compares."""


class TierState(Enum):
    """The states of a tier below the host."""

    # Not all of the disk tier's files are open yet, or the remote tier has not answered yet.
    OPENING = "opening"
    OPEN = "open"
    FAILING = "failing"  # a call hangs, or too many calls failed; no copy starts until the tier works again
    CLOSED = "closed"  # the disk tier's index cannot be used; the tier is off until the engine restarts


class Answer(Enum):
    """The remote tier's answers about a block."""

    FOUND = "found"
    MISSING = "missing"
    NONE = "none"  # the call failed or timed out, or no call was made

    __hash__ = object.__hash__  # hash by identity, because `Enum.__hash__` is a slow Python call


class LoadWait(Enum):
    """The reasons why a request must wait before it can compute."""

    OWN_LOAD = "own_load"
    OTHERS_LOAD = Deferral.OTHERS_LOAD.value
    FETCH = Deferral.FETCH.value
    ROOM = Deferral.ROOM.value

    __hash__ = object.__hash__  # hash by identity, because `Enum.__hash__` is a slow Python call


class Hook(StrEnum):
    """The calls that an engine makes to kvoffload. All engines have the same hooks."""

    SEEN = "seen"
    LOOKUP = "lookup"
    ALLOCATED = "allocated"
    STEP = "step"
    ENDED = "ended"
    REPORT = "report"
    RESET = "reset"


class Subscriber(StrEnum):
    """The labels for subscribers of the bus. All unknown subscribers have the label OTHER."""

    LOG = "log"
    JOURNAL = "journal"
    SPANS = "spans"
    COUNTERS = "counters"
    GAUGES = "gauges"
    OTHER = "other"


def subscriber_label(name: str) -> str:
    """Return the label for a subscriber's name or a method's qualified name, which is "other" for unknown ones."""
    owner = name.partition(".")[0]
    return owner if owner in _SUBSCRIBERS else _OWNERS.get(owner, Subscriber.OTHER).value


_SUBSCRIBERS = frozenset(member.value for member in Subscriber)
_OWNERS = {"LogObserver": Subscriber.LOG, "Journal": Subscriber.JOURNAL, "SpanObserver": Subscriber.SPANS}


def label_of(member: Enum | str) -> str:
    """Return the label for an enum's member: the value, or the lower-case name if the value is an integer."""
    if not isinstance(member, Enum):
        return member
    return member.name.lower() if isinstance(member.value, int) else str(member.value)


# -- the interfaces that readers use ------------------------------------------------------------------------------


class OpenCopies(Protocol):
    draining: int

    @property
    def oldest(self) -> float | None: ...

    def count(self, direction: Direction, *, is_overdue: bool) -> int: ...


class Benefit(Protocol):
    saved_s: float
    interference_s: dict[Direction, float]
    is_negative: bool

    @property
    def prefill_tokens_per_s(self) -> float: ...

    def break_even(self) -> Mapping[Tier, int]: ...


class Pins(Protocol):
    oldest: float | None


class Predicted(Protocol):
    series: Mapping[str, Series]


class Observed(Protocol):
    """The part of `Observation` that metric readers use."""

    @property
    def pins(self) -> Pins: ...

    @property
    def curve(self) -> Predicted | None: ...


class Catalog(Protocol):
    """The part of a tier's catalog that metric readers use."""

    @property
    def faults(self) -> Mapping[RemoteFault, int]: ...


class NodeFiles(Protocol):
    """The part of the catalog of other engines' memory that metric readers use."""

    neighbours: Mapping[str, Sized]


class HostFiles(Protocol):
    """The part of the catalog of host memory in files that metric readers use."""

    orphans_size: int

    @property
    def adoption(self) -> Adoption: ...


class Faults(Protocol):
    audits: int


class HostSide(Protocol):
    """What the readers use of metrics that have a meaning without an engine. Any thread may call a reader."""

    @property
    def state(self) -> HostState: ...

    @property
    def reports(self) -> Mapping[Rank, TransferReport]: ...

    @property
    def catalogs(self) -> Mapping[Tier, Catalog]: ...

    @property
    def info(self) -> Labels: ...

    @property
    def degraded(self) -> DegradeCause | None: ...


class Side(HostSide, Protocol):
    """The part of the scheduler side that metric readers use."""

    core: OffloadCore
    bus: Bus

    @property
    def observation(self) -> Observed: ...

    @property
    def copies(self) -> OpenCopies: ...

    def unix(self, since: float | None) -> float: ...

    def choose_policy(self, policy: str, found: Mapping[str, float]) -> None: ...

    @property
    def benefit(self) -> Benefit: ...

    @property
    def faults(self) -> Faults: ...


# -- the types of the catalogue's entries -------------------------------------------------------------------------


class Kind(Enum):
    """A metric's type in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric, and the enum that lists the label's values.

    Args:
        name: the label's name in queries.
        enum: the label's values; None if the values are known only while an engine runs.
        served: the values that the metric uses, most of them members of `enum`; by default all members.
    """

    name: str
    enum: type[Enum] | None = None
    served: tuple[Enum | str, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """The label's values in queries."""
        return tuple(map(label_of, self.served or self.enum or ()))


@dataclass(frozen=True, eq=False)
class Metric:
    """The declaration of one metric.

    Args:
        name: the full name, as in queries.
        help: the description that Prometheus shows to operators.
        kind: counter, gauge or histogram.
        labels: the labels, in the order of `Labels` tuples.
        unit: the unit of the values.
        buckets: the upper bounds of a histogram's buckets, without +Inf.
        read: a function that returns the metric's series for a scrape, from a `Side` or a `HostSide`, and may omit
            series that are 0. None if events increase the metric.
        counts: the classes of the events that increase the metric, each with the name of the field to add; None adds 1.
            The events have a field for each label. Empty if `read` or a method of `Counters` determines the values.
        where: a field's name and values. If set, only events whose field has one of the values increase the metric.
        tiers: the lower tiers of which an engine must have at least one to export the metric; empty for all engines.
    """

    name: str
    help: str
    kind: Kind
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    read: Callable[[Any], Series] | None = None
    counts: Mapping[type[events.Event], str | None] = field(default_factory=dict)
    where: tuple[str, tuple[Enum, ...]] | None = None
    tiers: Set[Tier] = frozenset()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @cached_property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """All combinations of label values; empty if a label has no enum.

        Exporters create these series at the start, so that a rate includes the first increase.
        """
        return tuple(itertools.product(*(label.values for label in self.labels)))

    def series_with(self, tiers: Set[Tier]) -> Sequence[Labels]:
        """Return the combinations of label values that can occur on an engine with the given lower tiers."""
        return _series_with(self, frozenset(tiers))


@cache
def _series_with(metric: Metric, tiers: frozenset[Tier]) -> Sequence[Labels]:
    if metric.tiers and metric.tiers.isdisjoint(tiers):
        return ()
    off = {value for value, needed in _ONLY_WITH.items() if needed.isdisjoint(tiers)}
    return tuple([labels for labels in metric.series if off.isdisjoint(labels)])


_NODE = frozenset((Tier.NODE,))
_REMOTE = frozenset((Tier.REMOTE,))
_OF_ANY_TIER = MissCause.TIER_OPENING.value, EvictionCause.SPILL_BEHIND.value, LoadWait.FETCH.value
# For label values that occur only on some engines: the lower tiers of which an engine must have at least one.
_ONLY_WITH: Mapping[str, Set[Tier]] = {
    **{tier.value: frozenset((tier,)) for tier in LOWER_TIERS},
    **{tier.miss_cause.value: frozenset((tier,)) for tier in LOWER_TIERS if tier.miss_cause is not None},
    **dict.fromkeys(_OF_ANY_TIER, frozenset(LOWER_TIERS)),
}


# A copy has the label of the lower of its two tiers: a copy between the host and the disk has the label "disk".
_TIER = Label("tier", Tier, served=(Tier.HOST, *SLOT_TIERS))
# Only copies have the label of a tier that manages its blocks itself, because kvoffload does not know its slots.
_COPY_TIERS = Label("tier", Tier, served=(Tier.HOST, *LOWER_TIERS))
_LOWER_TIERS = Label("tier", Tier, served=LOWER_TIERS)
_DIRECTION = Label("direction", Direction)
_PART = Label("part", Part)
_TIER_SIZES = Label("tiers", TierSizes)
_CAPACITY = Label("capacity", served=tuple(CAPACITIES))
# The states in which a job still uses memory.
_OPEN_JOB = Label("state", JobState, served=(JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED))
_RESULT = Label("result", LookupResult)
_POLICY = Label("policy", served=POLICIES)
_SUBSCRIBER = Label("subscriber", Subscriber)
_FEED = Label(
    "subscriber", Subscriber, served=tuple(each for each in Subscriber if each is not Subscriber.GAUGES)
)
# `provenance.info_labels` returns the values in the same order. vLLM adds a label "engine", hence "engine_name".
_INFO = tuple(
    Label(name)
    for name in (
        *("version", "engine_name", "engine_version", "store_policy", "verify", "min_load_tokens"),
        "host_copies",
    )
)

# The time of a failed copy says nothing about the speed of the link.
_SUCCEEDED = ("outcome", (CopyOutcome.DONE,))
# The causes of evictions that more memory would have avoided.
_FOR_SPACE = ("cause", (EvictionCause.SPACE, EvictionCause.SPILL_BEHIND))

# fmt: off
# Copy times range from one small block on a fast link to a whole prompt at the default timeout of 30 s.
_COPY_BUCKETS = (
    5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
)
# Times to first token range from a short prompt on a fast device to a long prompt behind a queue.
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
# Waits range from a millisecond, which users do not notice, to the time limit of a copy.
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# Hits range from one small block to the longest prompt.
_HIT_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)
# Eviction ages range from seconds, after which even prompts that return soon find nothing, to a day, after which few
# prompts return.
_AGE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
# Hook times range from a microsecond, if there is nothing to do, to times that visibly slow a step.
_HOOK_BUCKETS = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1)
# fmt: on


# -- readers ------------------------------------------------------------------------------------------------------


def tier_state(side: HostSide, tier: Tier) -> TierState | None:
    """Return the state of a tier below the host; None if the engine does not have the tier."""
    found = side.state.by_name.get(tier)
    if found is None:
        return None
    if found.is_closed and tier.has_slots:  # other tiers can open again
        return TierState.CLOSED
    if not found.is_open:
        return TierState.OPENING
    return TierState.OPEN if found.is_usable else TierState.FAILING


def _tier_states(side: HostSide) -> Series:
    tiers = side.state.by_name
    return {(tier.value, state.value): 1 for tier in tiers if (state := tier_state(side, tier))}


def _with_slots(side: HostSide) -> list[LowerTier]:
    return [lower for lower in side.state.tiers if lower.tier.has_slots]


def _slots(side: HostSide) -> Series:
    slots = _by_state(Tier.HOST, side.state.pool)
    for lower in _with_slots(side):
        slots |= _by_state(lower.tier, lower.pool)
        # The pool's quarantined slots include slots for which the tier has no space. The metric excludes them, so that
        # the states sum to the capacity.
        beyond = lower.pool.capacity - lower.capacity
        slots[lower.tier.value, label_of(SlotState.QUARANTINED)] -= beyond
    return slots


def _by_state(tier: Tier, pool: SlotPool) -> dict[Labels, float]:
    return {(tier.value, label_of(state)): pool.count(state) for state in SlotState}


def _capacities(side: HostSide) -> Series:
    found: dict[Labels, float] = {(Tier.HOST.value,): side.state.pool.capacity}
    for lower in _with_slots(side):
        found[lower.tier.value,] = lower.capacity
    return found


def _capacity_blocks(side: HostSide) -> dict[Labels, float]:
    found: dict[Labels, float] = {
        (*tier, Part.TOTAL.value): slots for tier, slots in _capacities(side).items()
    }
    slots = _slots(side)
    return found | {(tier, Part.FREE.value): slots[tier, label_of(SlotState.EMPTY)] for tier, _ in found}


def _capacity_bytes(side: HostSide) -> Series:
    sizes = _slot_bytes(side)
    return {(tier, part): slots * sizes[tier,] for (tier, part), slots in _capacity_blocks(side).items()}


def _predicted(metric: str) -> Callable[[Side], Series]:
    """Return a reader of a metric about tiers of other sizes."""
    return lambda side: (
        {} if side.observation.curve is None else side.observation.curve.series.get(metric, {})
    )


def _slot_bytes(side: HostSide) -> Series:
    sizes = [report.slot_bytes for report in side.reports.values()]
    found: dict[Labels, float] = {(Tier.HOST.value,): sum(sizes)}
    for lower in _with_slots(side):
        found[lower.tier.value,] = sum(map(round_up, sizes))
    return found


def _host_bytes(side: Side) -> Series:
    pool, reports = side.core.state.pool, side.reports.values()
    used_slots = pool.capacity - pool.count(SlotState.EMPTY)
    return {
        (HostBytes.WANTED.value,): sum(report.slot_bytes * report.wanted_slots for report in reports),
        (HostBytes.RESERVED.value,): sum(report.slot_bytes * report.ready_slots for report in reports),
        (HostBytes.USED.value,): sum(report.slot_bytes * used_slots for report in reports),
    }


def _open_jobs(side: Side) -> Series:
    jobs, copies = side.core.state.jobs, side.copies
    found: dict[Labels, float] = {}
    for way in Direction:
        numbers = {
            JobState.PLANNED: jobs.count(way, JobState.PLANNED),
            JobState.SUBMITTED: copies.count(way, is_overdue=False),
            JobState.ABANDONED: copies.count(way, is_overdue=True),
        }
        for state, number in numbers.items():
            found[Tier.HOST.value, way.value, label_of(state)] = number
            for tier in SLOT_TIERS:
                found[tier.value, way.value, label_of(state)] = jobs.count(way, state, tier)
    return found


def _fetch_break_even(side: Side) -> Series:
    return {
        (tier.value,): tokens for tier, tokens in side.benefit.break_even().items() if tier is not Tier.HOST
    }


def _dropped(side: Side) -> Series:
    dropped: dict[Labels, float] = {}
    for name, feed in side.bus.feeds.items():
        labels = (subscriber_label(name),)
        dropped[labels] = dropped.get(labels, 0) + feed.dropped
    return dropped


def _degraded(side: HostSide) -> Series:
    return {(side.degraded.value,): 1} if side.degraded is not None else {}


def _remote_errors(side: HostSide) -> Series:
    reported = [status for report in side.reports.values() for status in report.below]
    counts = [status.faults for status in reported if status.tier is Tier.REMOTE]
    if (catalog := side.catalogs.get(Tier.REMOTE)) is not None:
        counts.append(tuple(catalog.faults.values()))
    found = zip(RemoteFault, *filter(None, counts), strict=False)
    return {(fault.value,): sum(each) for fault, *each in found}


def _neighbours(side: HostSide) -> Mapping[str, Sized]:
    catalog = cast("NodeFiles | None", side.catalogs.get(Tier.NODE))
    return {} if catalog is None else catalog.neighbours


def _node_losses(side: HostSide) -> Series:
    reported = [status for report in side.reports.values() for status in report.below]
    counts = [status.faults for status in reported if status.tier is Tier.NODE]
    return {(loss.value,): sum(each) for loss, *each in zip(NodeLoss, *counts, strict=False)}


def _host_files(side: HostSide) -> HostFiles | None:
    """Return the catalog of host memory in files; None without `host_path`."""
    return cast("HostFiles | None", side.catalogs.get(Tier.HOST))


def _adoption(side: HostSide) -> Series:
    files = _host_files(side)
    return {} if files is None else {(files.adoption.value,): 1}


def _orphan_bytes(side: HostSide) -> Series:
    files = _host_files(side)
    return {} if files is None else {(): files.orphans_size}


def _attach_seconds(side: HostSide) -> Series:
    """Return the time of the slowest rank, once every rank's memory is ready."""
    files = [
        status.file for report in side.reports.values() for status in report.below if status.tier is Tier.HOST
    ]
    seconds = [file.seconds for file in files if file is not None]
    return {(): max(seconds)} if seconds and all(seconds) else {}


def _by_direction(numbers: Mapping[Direction, float]) -> Series:
    return {(each.value,): number for each, number in numbers.items()}


# -- the catalogue ------------------------------------------------------------------------------------------------

# fmt: off
CATALOGUE: tuple[Metric, ...] = (
    # --- what lookups found ---
    Metric("kvoffload_lookup_blocks_total", "Block positions looked up on the host, beyond those that the device held; counted once per admission. opted_out: the request asked not to read cached blocks, so they were not looked up.", Kind.COUNTER, (_RESULT,), "blocks"),
    Metric("kvoffload_lookup_tokens_total", "Tokens in these block positions.", Kind.COUNTER, (_RESULT,), "tokens"),
    Metric("kvoffload_miss_blocks_total", "Looked-up block positions that missed, by cause; the causes sum to the missed blocks.", Kind.COUNTER, (Label("cause", MissCause),), "blocks"),
    Metric("kvoffload_lookups_deferred_total", "Lookups answered with 'not yet', because another request was loading the same prefix, blocks were being fetched from a tier below the host, or requests with loads needed the device's blocks. Each wait counts once, however often the engine asks.", Kind.COUNTER, (Label("reason", Deferral),), "lookups", counts={events.LookupDeferred: None}),
    Metric("kvoffload_fetched_tokens_total", "Tokens of host hits that had been fetched from the tier for the request that found them.", Kind.COUNTER, (_LOWER_TIERS,), "tokens"),
    Metric("kvoffload_hit_tokens", "Tokens that the host added to a request's prefix, for each admitted request with a hit.", Kind.HISTOGRAM, (), "tokens", _HIT_BUCKETS),
    Metric("kvoffload_prompt_tokens_total", "Prompt tokens of requests that reached their first token, by where their KV came from. The tokens of a load that failed are computed; node, disk and remote count what was fetched for the request.", Kind.COUNTER, (Label("source", Tier, served=(*Tier, "computed")),), "tokens"),
    Metric("kvoffload_pin_dropped_blocks_total", "Blocks that a lookup pinned and that were released without being loaded.", Kind.COUNTER, (Label("cause", PinDropCause),), "blocks", counts={events.HitDropped: "blocks"}),
    # --- outcomes of offers and loads ---
    Metric("kvoffload_offered_blocks_total", "Computed blocks offered to the host; each ends with one outcome.", Kind.COUNTER, (), "blocks", counts={events.BlocksOffered: "blocks"}),
    Metric("kvoffload_store_blocks_total", "Offered blocks by final outcome.", Kind.COUNTER, (Label("outcome", StoreOutcome),), "blocks", counts={events.StoreEnded: "blocks"}),
    Metric("kvoffload_load_scheduled_blocks_total", "Blocks scheduled to be loaded; each ends with one outcome.", Kind.COUNTER, (), "blocks", counts={events.LoadScheduled: "blocks"}),
    Metric("kvoffload_load_blocks_total", "Blocks scheduled to be loaded, by final outcome.", Kind.COUNTER, (Label("outcome", LoadOutcome),), "blocks", counts={events.LoadEnded: "blocks"}),
    Metric("kvoffload_tier_scheduled_blocks_total", "Blocks scheduled to be copied between the host and a tier below it; each ends with one outcome.", Kind.COUNTER, (_LOWER_TIERS, _DIRECTION), "blocks", counts={events.TierCopyScheduled: "blocks"}),
    Metric("kvoffload_tier_blocks_total", "Blocks scheduled to be copied between the host and a tier below it, by final outcome.", Kind.COUNTER, (_LOWER_TIERS, _DIRECTION, Label("outcome", TierOutcome)), "blocks", counts={events.TierCopyEnded: "blocks"}),
    # --- the remote tier ---
    Metric("kvoffload_remote_asked_blocks_total", "Blocks of arriving requests for which the remote tier was asked, by its answer; none: the call failed or took too long.", Kind.COUNTER, (Label("answer", Answer),), "blocks", tiers=_REMOTE),
    Metric("kvoffload_remote_ask_seconds", "Time of an answered call that asks the remote tier for one request's blocks; the request waits for the answer.", Kind.HISTOGRAM, (), "seconds", _COPY_BUCKETS, tiers=_REMOTE),
    Metric("kvoffload_remote_errors_total", "Calls to the remote tier that failed, and writes that it refused, by the scheduler and all ranks.", Kind.COUNTER, (Label("kind", RemoteFault),), "errors", read=_remote_errors, tiers=_REMOTE),
    # --- the memory of other engines on this machine ---
    Metric("kvoffload_neighbours", "Other engines on this machine whose host memory this engine reads, including stopped ones whose memory is kept.", Kind.GAUGE, (), "engines", read=lambda side: {(): len(_neighbours(side))}, tiers=_NODE),
    Metric("kvoffload_neighbour_blocks", "Blocks that these engines hold; a block that several hold counts several times.", Kind.GAUGE, (), "blocks", read=lambda side: {(): sum(map(len, _neighbours(side).values()))}, tiers=_NODE),
    Metric("kvoffload_node_lost_blocks_total", "Blocks that a rank could not fetch from another engine's memory. torn: it was overwritten meanwhile. gone: the memory was reset, removed or taken over.", Kind.COUNTER, (Label("cause", NodeLoss),), "blocks", read=_node_losses, tiers=_NODE),
    # --- recurrent states ---
    Metric("kvoffload_state_blocks_total", "Stored and loaded blocks that are recurrent states.", Kind.COUNTER, (_DIRECTION,), "blocks", counts={events.StatesCopied: "blocks"}),
    Metric("kvoffload_prefix_boundaries_asked_total", "Admitted requests whose prefix lacked only a recurrent state; the engine was then asked to keep this state.", Kind.COUNTER, (), "boundaries", counts={events.BoundaryAsked: None}),
    Metric("kvoffload_prefix_boundaries_made_total", "Recurrent states that the engine was asked to keep, and that it kept and offered; at most one per request.", Kind.COUNTER, (), "boundaries", counts={events.BoundaryMade: None}),
    # --- copies, per rank ---
    Metric("kvoffload_transfers_total", "Copies of single ranks that ended, by outcome.", Kind.COUNTER, (_COPY_TIERS, _DIRECTION, Label("outcome", CopyOutcome)), "copies", counts={events.RankReported: None}),
    Metric("kvoffload_transfer_bytes_total", "Bytes copied between the tier and the tier above it, all ranks together.", Kind.COUNTER, (_COPY_TIERS, _DIRECTION), "bytes", counts={events.RankReported: "copied_bytes"}),
    Metric("kvoffload_transfer_seconds", "Time from a copy's start to its end, per rank and successful job.", Kind.HISTOGRAM, (_COPY_TIERS, _DIRECTION), "seconds", _COPY_BUCKETS, counts={events.RankReported: "copy_s"}, where=_SUCCEEDED),
    Metric("kvoffload_transfer_queue_seconds", "Time from a job's submission to its copy's start, per rank and successful job.", Kind.HISTOGRAM, (_COPY_TIERS, _DIRECTION), "seconds", _COPY_BUCKETS, counts={events.RankReported: "queue_s"}, where=_SUCCEEDED),
    Metric("kvoffload_open_jobs", "Jobs that have not ended on all ranks.", Kind.GAUGE, (_TIER, _DIRECTION, _OPEN_JOB), "jobs", read=_open_jobs),
    Metric("kvoffload_oldest_job_timestamp_seconds", "Unix time at which the oldest open job was submitted, leaving out abandoned jobs; 0 if there is none.", Kind.GAUGE, (), "seconds", read=lambda side: {(): side.unix(side.copies.oldest)}),
    Metric("kvoffload_store_bound_ratio", "Current limit on store bytes in flight as a share of its maximum, on the rank where it is lowest. The limit is halved when stores are slow or run at the same time as loads; then it recovers.", Kind.GAUGE, (), "ratio", read=lambda side: {(): min(report.store_share for report in side.reports.values())}),
    Metric("kvoffload_abandoned_jobs_total", "Jobs abandoned because a copy did not end within transfer_timeout_s.", Kind.COUNTER, (_DIRECTION,), "jobs", counts={events.JobAbandoned: None}),
    Metric("kvoffload_abandoned_device_blocks", "Device blocks that abandoned copies still hold; the engine cannot reuse them until these copies end.", Kind.GAUGE, (), "blocks", read=lambda side: {(): side.core.state.stall.blocks}),
    Metric("kvoffload_copies_stalled", "1 while no new copy starts because copies do not end: abandoned copies of several jobs hold over an eighth of the device pool, or three jobs in a row were abandoned.", Kind.GAUGE, (), "flag", read=lambda side: {(): int(side.core.state.stall.is_on)}),
    Metric("kvoffload_abandoned_blocks_total", "Blocks of abandoned jobs; their host slots are not used again.", Kind.COUNTER, (_DIRECTION,), "blocks", counts={events.JobAbandoned: "blocks"}),
    # --- the tiers' slots ---
    Metric("kvoffload_tier_state", "1 for the tier's current state, 0 for the others.", Kind.GAUGE, (_LOWER_TIERS, Label("state", TierState)), "flag", read=_tier_states),
    Metric("kvoffload_capacity_slots", "Slots that are ready on every rank.", Kind.GAUGE, (_TIER,), "slots", read=_capacities),
    Metric("kvoffload_slots", "Slots by state; the states sum to the capacity.", Kind.GAUGE, (_TIER, Label("state", SlotState)), "slots", read=_slots),
    Metric("kvoffload_slot_bytes", "Bytes of one slot, all ranks together; multiply by slots for the tier's bytes.", Kind.GAUGE, (_TIER,), "bytes", read=_slot_bytes),
    Metric("kvoffload_capacity_blocks", "Blocks that fit into the tier, for routers and autoscalers: in total, and in slots without a block. A full cache is normal: a new block replaces the least recently used one.", Kind.GAUGE, (_TIER, _PART), "blocks", read=_capacity_blocks),
    Metric("kvoffload_capacity_bytes", "The same in bytes, all ranks together.", Kind.GAUGE, (_TIER, _PART), "bytes", read=_capacity_bytes),
    Metric("kvoffload_host_bytes", "Bytes of host memory, all ranks together: wanted by the settings, reserved (pinned) so far, and used.", Kind.GAUGE, (Label("state", HostBytes),), "bytes", read=_host_bytes),
    Metric("kvoffload_evicted_blocks_total", "Blocks that left the tier.", Kind.COUNTER, (_TIER, Label("cause", EvictionCause)), "blocks", counts={events.BlocksEvicted: "blocks", events.TierBlocksEvicted: "blocks"}),
    Metric("kvoffload_ended_session_blocks_total", "Host blocks that leave early because a client said that their session had ended.", Kind.COUNTER, (), "blocks", counts={events.SessionEnded: "blocks"}),
    Metric("kvoffload_eviction_age_seconds", "Time since the last use of blocks that were evicted from the host for space. Blocks evicted together count once, with the block that was used last.", Kind.HISTOGRAM, (), "seconds", _AGE_BUCKETS, counts={events.BlocksEvicted: "age_s"}, where=_FOR_SPACE),
    Metric("kvoffload_oldest_pin_timestamp_seconds", "Unix time of the oldest pin; 0 if there is none.", Kind.GAUGE, (), "seconds", read=lambda side: {(): side.unix(side.observation.pins.oldest)}),
    # --- host memory in files ---
    Metric("kvoffload_host_adoption", "1 for what the start did with the blocks that an earlier engine left in host_path, 0 for the others; all 0 without host_path. All results but opening, adopted and nothing_left say why nothing was adopted.", Kind.GAUGE, (Label("result", Adoption),), "flag", read=_adoption),
    Metric("kvoffload_adopted_blocks_total", "Blocks of an earlier engine that were found in host memory after the start.", Kind.COUNTER, (), "blocks", counts={events.BlocksAdopted: "blocks"}),
    Metric("kvoffload_adopted_hit_blocks_total", "Adopted blocks that a load has read; each counts once.", Kind.COUNTER, (), "blocks", counts={events.AdoptedBlocksHit: "blocks"}),
    Metric("kvoffload_host_attach_seconds", "Time until all host memory in host_path was ready, on the slowest rank; 0 until then. Memory that an earlier engine left is only mapped and pinned.", Kind.GAUGE, (), "seconds", read=_attach_seconds),
    Metric("kvoffload_host_orphan_bytes", "Bytes of host memory that the files of stopped engines took in host_path when this engine last looked: at its start, and ten minutes later.", Kind.GAUGE, (), "bytes", read=_orphan_bytes),
    # --- time saved and time lost ---
    Metric("kvoffload_first_token_seconds", "Time from a request's arrival to the first step after its first token, by what its last lookup found. Up to one step too long.", Kind.HISTOGRAM, (Label("found", Tier, served=(*LOWER_TIERS, Tier.HOST, Tier.DEVICE, "nothing")),), "seconds", _FIRST_TOKEN_BUCKETS),
    Metric("kvoffload_prefill_seconds_saved_total", "Prefill time that loads saved: loaded tokens times the measured prefill time per token. An estimate.", Kind.COUNTER, (), "seconds", read=lambda side: {(): side.benefit.saved_s}),
    Metric("kvoffload_load_wait_seconds", "Time that a request waited: for its own load, from allocation to its end; for another request's load of the same prefix; for a fetch from a tier below the host; or for room on the device beside other loads.", Kind.HISTOGRAM, (Label("reason", LoadWait),), "seconds", _WAIT_BUCKETS),
    Metric("kvoffload_interference_seconds_total", "Time that copies added to the engine's steps, from comparing decode steps with and without copies. An estimate.", Kind.COUNTER, (_DIRECTION,), "seconds", read=lambda side: _by_direction(side.benefit.interference_s)),
    Metric("kvoffload_prefill_tokens_per_second", "Prefill rate: prefilled tokens per second of the time that they add to the engine's steps. It is the median of the last measurements, and 0 until measured.", Kind.GAUGE, (), "tokens", read=lambda side: {(): side.benefit.prefill_tokens_per_s}),
    Metric("kvoffload_break_even_tokens", "Hits of at least this many tokens are worth a load, with the requests that wait and the loads that are open at the moment; 0 until measured, 1000000 if no hit is.", Kind.GAUGE, (), "tokens", read=lambda side: {(): side.benefit.break_even()[Tier.HOST]}),
    Metric("kvoffload_fetch_break_even_tokens", "Hits of at least this many tokens on a tier below the host are worth a fetch and a load, with the requests that wait and the loads that are open at the moment; 0 until measured, 1000000 if no hit is.", Kind.GAUGE, (_LOWER_TIERS,), "tokens", read=_fetch_break_even),
    Metric("kvoffload_net_benefit_negative", "1 after a minute in which waiting and interference cost more than loads saved, by over 1 % of the minute, until a minute with a gain.", Kind.GAUGE, (), "flag", read=lambda side: {(): int(side.benefit.is_negative)}),
    # --- what tiers of other sizes would find ---
    Metric("kvoffload_predicted_hit_tokens_ratio", "Share of prompt tokens that the device and a host of another size would have found, or a disk of another size below today's host; a capacity is a multiple of today's. Without a disk, the disk's capacities are multiples of the host's.", Kind.GAUGE, (_TIER_SIZES, _CAPACITY), "ratio", read=_predicted("kvoffload_predicted_hit_tokens_ratio")),
    Metric("kvoffload_predicted_margin_ratio", "By how much the predicted shares may be off, because they follow a sample of the blocks (three standard deviations); 1 without lookups.", Kind.GAUGE, (), "ratio", read=_predicted("kvoffload_predicted_margin_ratio")),
    Metric("kvoffload_predicted_unknown_ratio", "Share of prompt tokens that a tier of this capacity might have found in addition, had it been full at the engine's start. It shrinks with time.", Kind.GAUGE, (_TIER_SIZES, _CAPACITY), "ratio", read=_predicted("kvoffload_predicted_unknown_ratio")),
    Metric("kvoffload_predicted_seconds", "Seconds of traffic that the predictions rest on. Once a day, what was counted before is halved.", Kind.GAUGE, (), "seconds", read=_predicted("kvoffload_predicted_seconds")),
    Metric("kvoffload_predicted_prompt_tokens_per_second", "Prompt tokens a second in this time.", Kind.GAUGE, (), "tokens", read=_predicted("kvoffload_predicted_prompt_tokens_per_second")),
    Metric("kvoffload_next_gib_tokens_per_second", "Prompt tokens a second that the next GiB would find: of host memory, or of a disk below today's host.", Kind.GAUGE, (_TIER_SIZES,), "tokens", read=_predicted("kvoffload_next_gib_tokens_per_second")),
    Metric("kvoffload_predicted_policy_hit_ratio", "Share of the recent prompts' blocks that the device and the host would have found with each store policy. Empty with tiers below the host, with host_path, and with recurrent layers.", Kind.GAUGE, (_POLICY,), "ratio", read=_predicted("kvoffload_predicted_policy_hit_ratio")),
    Metric("kvoffload_store_policy", "1 for the store policy in use, 0 for the others. It changes only with store_policy auto.", Kind.GAUGE, (_POLICY,), "flag", read=lambda side: {(side.core.store_policy,): 1}),
    # --- health ---
    Metric("kvoffload_info", "Always 1; its labels are the engine's versions and settings.", Kind.GAUGE, _INFO, "flag", read=lambda side: {side.info: 1}),
    Metric("kvoffload_stale_blocks_zeroed_total", "Positions removed from requests' records because the engine reused their blocks.", Kind.COUNTER, (), "blocks", counts={events.BlocksZeroed: "blocks"}),
    Metric("kvoffload_resets_total", "Resets of the cache: nothing computed before a reset is found after it.", Kind.COUNTER, (), "resets", counts={events.ResetStarted: None}),
    Metric("kvoffload_reset_draining_jobs", "Jobs planned before the last reset that have not ended; their results are dropped.", Kind.GAUGE, (), "jobs", read=lambda side: {(): side.copies.draining}),
    Metric("kvoffload_contract_violations_total", "Calls by the engine that its contract does not allow; they were ignored.", Kind.COUNTER, (Label("cause", RejectionCause),), "violations", counts={events.FactRejected: None}),
    Metric("kvoffload_audits_total", "Audits of the invariants, made whenever the engine is idle and on request.", Kind.COUNTER, (), "audits", read=lambda side: {(): side.faults.audits}),
    Metric("kvoffload_degraded", "1 while offloading is off for this cause; it stays off until the engine restarts.", Kind.GAUGE, (Label("cause", DegradeCause),), "flag", read=_degraded),
    Metric("kvoffload_hook_seconds", "Time that a step spent in one of the offloading hooks.", Kind.HISTOGRAM, (Label("hook", Hook),), "seconds", _HOOK_BUCKETS),
    Metric("kvoffload_bus_dropped_total", "Events that an observer missed, because its feed was full or it was removed.", Kind.COUNTER, (_FEED,), "events", read=_dropped),
    Metric("kvoffload_bus_removed_total", "Observers, counters and metrics' readers that raised an exception and were removed.", Kind.COUNTER, (_SUBSCRIBER,), "subscribers"),
    Metric("kvoffload_span_export_errors_total", "Batches of OpenTelemetry spans that could not be sent to the collector.", Kind.COUNTER, (), "errors"),
    Metric("kvoffload_journal_write_errors_total", "Write errors of the journal's file; after the first error, the file is no longer written.", Kind.COUNTER, (), "errors"),
)
# fmt: on

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def read_all(
    side: HostSide,
    tiers: Set[Tier],
    on_failure: Callable[[str, Exception], object],
    metrics: Iterable[Metric] = CATALOGUE,
) -> dict[str, Series]:
    """Return the series of all metrics that have a reader, by the metric's name. A metric whose reader raises is left out.

    Args:
        side: what to read; a `Side`, unless the metrics have a meaning without an engine.
        tiers: the engine's lower tiers.
        on_failure: called with the name of each metric whose reader raised, and the exception.
        metrics: the metrics to read. Metrics without a reader are skipped.
    """
    found: dict[str, Series] = {}
    for metric in metrics:
        if metric.read is not None:
            try:
                series = metric.read(side)
                named = metric.series_with(tiers) if metric.series else series
                found[metric.name] = {labels: series.get(labels, 0) for labels in named}
            except Exception as error:
                on_failure(metric.name, error)
    return found
