"""Every metric, in one table: exporters build from it, dashboards/metrics.md prints it, checks of dashboards compare with it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from kvoffload.core.machine import JobState, SlotState
from kvoffload.model.causes import (
    CopyOutcome,
    DegradeCause,
    EvictionCause,
    Found,
    LoadOutcome,
    MissCause,
    PinDropCause,
    RejectionCause,
    StoreOutcome,
)
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.labels import Hook, HostBytes, LoadWait, LookupResult, Subscriber, label_of


class Kind(Enum):
    """A metric's type in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label and the enum that bounds it.

    Args:
        name: as queries write it.
        enum: holds every value that the label can take; None where values are fixed only once an engine runs.
        served: the values served from the start; by default all.
    """

    name: str
    enum: type[Enum] | None = None
    served: tuple[Enum, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """The values that are served."""
        return tuple(map(label_of, self.served or self.enum or ()))


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: in full, as queries write it.
        help: one sentence for the operator.
        kind: counter, gauge or histogram.
        labels: in the order of every label tuple.
        unit: what one is one of.
        buckets: a histogram's upper bounds, without the infinite one.
    """

    name: str
    help: str
    kind: Kind
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """Every combination of label values. All are served from the start, so that a rate never begins too late.

        None of a metric with a label without an enum: its one series is served once an engine runs.
        """
        return tuple(itertools.product(*(label.values for label in self.labels)))


# One tier today; a second one is served as soon as it is named here.
_TIER = Label("tier", Tier, served=(Tier.HOST,))
_DIRECTION = Label("direction", Direction)
# The states in which a job still holds memory.
_OPEN_JOB = Label("state", JobState, served=(JobState.PLANNED, JobState.SUBMITTED, JobState.ABANDONED))
_RESULT = Label("result", LookupResult)
_SUBSCRIBER = Label("subscriber", Subscriber)
# In the order of `provenance.info_labels`. "engine" is a label of vLLM's.
_INFO = tuple(
    map(
        Label,
        (
            "version",
            "engine_name",
            "engine_version",
            "store_policy",
            "eviction_policy",
            "verify",
            "min_load_tokens",
        ),
    )
)

# Copies: from one small block over a fast link to a whole prompt at the default timeout of 30 s.
_COPY_BUCKETS = (
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)
# First tokens: from a short prompt on a fast device to a long one behind a queue.
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
# Hooks: a few microseconds when nothing happens; a millisecond is far too much.
_HOOK_BUCKETS = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1)

# fmt: off
CATALOGUE: tuple[Metric, ...] = (
    # --- what lookups found ---
    Metric("kvoffload_lookup_blocks_total", "Block positions looked up on the host beyond what the device held, once per admission.", Kind.COUNTER, (_RESULT,), "blocks"),
    Metric("kvoffload_lookup_tokens_total", "Tokens in the block positions looked up.", Kind.COUNTER, (_RESULT,), "tokens"),
    Metric("kvoffload_miss_blocks_total", "Looked-up block positions that did not hit, by cause; the causes sum to the missed blocks.", Kind.COUNTER, (Label("cause", MissCause),), "blocks"),
    Metric("kvoffload_lookups_deferred_total", "Lookups answered with 'not yet' because another request was loading the same prefix.", Kind.COUNTER, (), "lookups"),
    Metric("kvoffload_pin_dropped_blocks_total", "Blocks that a lookup pinned and that were let go without a load.", Kind.COUNTER, (Label("cause", PinDropCause),), "blocks"),
    # --- what became of offers and loads ---
    Metric("kvoffload_offered_blocks_total", "Computed blocks offered to the host; each gets one store outcome in the end.", Kind.COUNTER, (), "blocks"),
    Metric("kvoffload_store_blocks_total", "Offered blocks by final outcome.", Kind.COUNTER, (Label("outcome", StoreOutcome),), "blocks"),
    Metric("kvoffload_load_scheduled_blocks_total", "Blocks whose load became binding; each gets one load outcome in the end.", Kind.COUNTER, (), "blocks"),
    Metric("kvoffload_load_blocks_total", "Loaded blocks by final outcome.", Kind.COUNTER, (Label("outcome", LoadOutcome),), "blocks"),
    # --- recurrent states, of models that have them ---
    Metric("kvoffload_state_blocks_total", "Blocks of recurrent states among those stored and loaded.", Kind.COUNTER, (_DIRECTION,), "blocks"),
    Metric("kvoffload_junctions_asked_total", "Requests admitted whose prefix was on device and host but for a recurrent state at its end, which the engine was asked to keep.", Kind.COUNTER, (), "junctions"),
    Metric("kvoffload_junctions_made_total", "Of the groups' recurrent states that were asked for, those that the engine kept and offered, one a request.", Kind.COUNTER, (), "junctions"),
    # --- copies, per rank ---
    Metric("kvoffload_transfers_total", "Ranks' parts of jobs that ended.", Kind.COUNTER, (_TIER, _DIRECTION, Label("outcome", CopyOutcome)), "copies"),
    Metric("kvoffload_transfer_bytes_total", "Bytes copied between device and tier, all ranks together.", Kind.COUNTER, (_TIER, _DIRECTION), "bytes"),
    Metric("kvoffload_transfer_seconds", "Time from a copy's start to its end, per rank and job that ended well.", Kind.HISTOGRAM, (_TIER, _DIRECTION), "seconds", _COPY_BUCKETS),
    Metric("kvoffload_transfer_queue_seconds", "Time from a job's submission to its copy's start, per rank and job that ended well.", Kind.HISTOGRAM, (_TIER, _DIRECTION), "seconds", _COPY_BUCKETS),
    Metric("kvoffload_open_jobs", "Jobs that have not ended on every rank.", Kind.GAUGE, (_DIRECTION, _OPEN_JOB), "jobs"),
    Metric("kvoffload_oldest_job_timestamp_seconds", "Unix time of the submission of the oldest job that has not ended and was not abandoned; 0 without one.", Kind.GAUGE, (), "seconds"),
    Metric("kvoffload_store_bound_ratio", "Bytes of stores that may be in flight, over the most that ever may, on the rank that holds back most, as of its last report: stores that meet loads or run slowly halve it, others give it back.", Kind.GAUGE, (), "ratio"),
    Metric("kvoffload_abandoned_jobs_total", "Jobs abandoned because a copy did not end within transfer_timeout_s.", Kind.COUNTER, (_DIRECTION,), "jobs"),
    Metric("kvoffload_abandoned_device_blocks", "Device blocks under copies that were abandoned: the engine cannot use them until these copies have ended after all.", Kind.GAUGE, (), "blocks"),
    Metric("kvoffload_copies_stalled", "1 while no new copy is begun because copies do not end: over an eighth of the device pool is under copies that were abandoned (and more than one job), or three jobs in a row were.", Kind.GAUGE, (), "flag"),
    Metric("kvoffload_written_off_blocks_total", "Blocks of abandoned jobs; their host slots are never used again.", Kind.COUNTER, (_DIRECTION,), "blocks"),
    # --- the host's slots ---
    Metric("kvoffload_capacity_slots", "Slots that every rank has ready.", Kind.GAUGE, (_TIER,), "slots"),
    Metric("kvoffload_slots", "Slots by state; they sum to the capacity.", Kind.GAUGE, (_TIER, Label("state", SlotState)), "slots"),
    Metric("kvoffload_host_bytes", "Bytes of host memory, all ranks together: what there will be, what is reserved (pinned) by now, and what of it is in use.", Kind.GAUGE, (Label("state", HostBytes),), "bytes"),
    Metric("kvoffload_evicted_blocks_total", "Blocks that left the tier.", Kind.COUNTER, (_TIER, Label("cause", EvictionCause)), "blocks"),
    Metric("kvoffload_oldest_pin_timestamp_seconds", "Unix time of the oldest pin that is still held; 0 without one.", Kind.GAUGE, (), "seconds"),
    # --- is it worth it ---
    Metric("kvoffload_first_token_seconds", "Time to first token, by what the request's last lookup found: from when the engine told of the request to the first step that it scheduled with the token there, so up to a step longer than it took.", Kind.HISTOGRAM, (Label("found", Found),), "seconds", _FIRST_TOKEN_BUCKETS),
    Metric("kvoffload_prefill_seconds_saved_total", "Tokens that loads brought, at the time that the engine's own steps add for prefilling one; an estimate.", Kind.COUNTER, (), "seconds"),
    Metric("kvoffload_load_wait_seconds_total", "Time that requests waited for loads, each request's added up: its own, from when it was bound to its end, or another's of the same prefix.", Kind.COUNTER, (Label("reason", LoadWait),), "seconds"),
    Metric("kvoffload_interference_seconds_total", "Time that copies cost the engine's steps: of each step with copies under way, the share by which decoding steps with such copies are longer than like ones without; an estimate.", Kind.COUNTER, (_DIRECTION,), "seconds"),
    Metric("kvoffload_prefill_tokens_per_second", "Tokens over the time that prefilling them adds to the engine's steps, median of the last runs of such steps; 0 until one was measured.", Kind.GAUGE, (), "tokens"),
    Metric("kvoffload_break_even_tokens", "Length of a hit from which on loading it takes less time than computing it; 0 until both were measured, 1000000 where no length does.", Kind.GAUGE, (), "tokens"),
    Metric("kvoffload_net_benefit_negative", "1 from a minute in which waiting and interference cost over 1 % more than was saved, until one in which it was worth it.", Kind.GAUGE, (), "flag"),
    # --- health ---
    Metric("kvoffload_info", "1; its labels are the versions and settings of the engine.", Kind.GAUGE, _INFO, "flag"),
    Metric("kvoffload_stale_blocks_zeroed_total", "Positions struck from requests' records because the engine handed their blocks out again.", Kind.COUNTER, (), "blocks"),
    Metric("kvoffload_resets_total", "Resets after which nothing computed before is found again.", Kind.COUNTER, (), "resets"),
    Metric("kvoffload_reset_draining_jobs", "Jobs that were under way at the last reset and have not ended or been abandoned; what they bring is found by nobody.", Kind.GAUGE, (), "jobs"),
    Metric("kvoffload_engine_surprises_total", "Things an engine did that its contract does not foresee; each was survived.", Kind.COUNTER, (Label("cause", RejectionCause),), "surprises"),
    Metric("kvoffload_audits_total", "Audits of the conservation laws: whenever the last request has ended and no copy is waited for, and on demand.", Kind.COUNTER, (), "audits"),
    Metric("kvoffload_degraded", "1 while offloading is switched off for good by this cause.", Kind.GAUGE, (Label("cause", DegradeCause),), "flag"),
    Metric("kvoffload_hook_seconds", "Time that the engine spent inside one of offloading's hooks.", Kind.HISTOGRAM, (Label("hook", Hook),), "seconds", _HOOK_BUCKETS),
    Metric("kvoffload_bus_dropped_total", "Events that an observer did not get because its feed was full or it had left.", Kind.COUNTER, (_SUBSCRIBER,), "events"),
    Metric("kvoffload_bus_removed_total", "Observers and counters removed because they raised.", Kind.COUNTER, (_SUBSCRIBER,), "subscribers"),
    Metric("kvoffload_span_export_errors_total", "Batches of OpenTelemetry spans that the collector at otlp_endpoint did not take.", Kind.COUNTER, (), "errors"),
    Metric("kvoffload_journal_write_errors_total", "Write errors of the journal's file; the first one ends the file.", Kind.COUNTER, (), "errors"),
)
# fmt: on

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def render_markdown() -> str:
    """Return the table for people, as dashboards/metrics.md shows it."""
    rows = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {_describe_labels(metric)} | {metric.help} |"
        for metric in CATALOGUE
    ]
    return "\n".join(rows) + "\n"


def _describe_labels(metric: Metric) -> str:
    return "; ".join(f"`{label.name}`: {', '.join(label.values)}" for label in metric.labels)
