"""The demo's numbers. `--json` prints a `DemoResult` with these names: they do not change, but names may be added."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

SCHEMA = 1
"""Incremented when a name of the JSON output changes its meaning or is removed."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a set of samples, in seconds.

    Args:
        samples: their number.
        p50: the median.
        p99: the 99th percentile, by the nearest rank.
    """

    samples: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What was played.

    Args:
        documents: files that the text comes from.
        library_tokens: tokens of it that come from Python's library.
        conversations, turns: how many, and how many turns each.
        attention, reach_tokens: of the model's local layers.
        device, seed: as asked for.
        device_blocks: of each engine's cache.
        kv_blocks: blocks that all conversations together need to continue from their ends.
        kv_to_cache: how many times the device's cache that is.
        offload: settings of kvoffload.
    """

    documents: tuple[str, ...]
    library_tokens: int
    conversations: int
    turns: int
    attention: str
    reach_tokens: int | None
    device: str
    seed: int
    device_blocks: int
    kv_blocks: int
    kv_to_cache: float
    offload: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PlayResult:
    """One play of all conversations.

    Args:
        prompt_tokens: tokens of all prompts.
        generated_tokens: tokens of all answers.
        computed_tokens: tokens that ran through the model.
        device_tokens: prompt tokens found in the device's own cache.
        host_tokens: prompt tokens loaded from the host.
        returning_reusable_tokens: prompt tokens of returning turns that a cache without limit would bring.
        returning_reused_tokens: those of them that came from the device or the host.
        returning_reused_share: the one over the other; None where nothing is reusable.
        first_ttft_s: time to first token of first turns.
        returning_ttft_s: the same of later turns; None where there are none.
        preemptions: how often a request lost its blocks.
        elapsed_s: while there was something to do, open copies included.
        tokens_per_s: prompt and generated tokens over that time.
    """

    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    device_tokens: int
    host_tokens: int
    returning_reusable_tokens: int
    returning_reused_tokens: int
    returning_reused_share: float | None
    first_ttft_s: Quantiles
    returning_ttft_s: Quantiles | None
    preemptions: int
    elapsed_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class BenefitResult:
    """The net benefit in seconds, as kvoffload estimates it.

    Args:
        saved_s: of prefill, at the engine's measured rate.
        waited_s: that requests waited for loads, summed over requests.
        interference_s: that copies added to the engine's steps.
        net_s: saved less waited and interference.
    """

    saved_s: float
    waited_s: float
    interference_s: float
    net_s: float


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """What kvoffload counted, by the labels of its metrics.

    Args:
        stored_bytes: device to host.
        loaded_bytes: host to device.
        offered_blocks: computed blocks offered to the host.
        stored_blocks: those that were stored.
        declined_blocks: the others, by reason.
        missed_blocks: looked-up blocks that were not found, by cause.
        loaded_blocks: blocks of loads, by outcome.
        evicted_blocks: blocks evicted from the host, by cause.
        host_slots: capacity of the host in blocks.
        benefit: seconds saved and lost.
        disk_written_bytes, disk_read_bytes: of the disk below the host.
        disk_tokens: tokens of hits that were fetched from it.
    """

    stored_bytes: int
    loaded_bytes: int
    offered_blocks: int
    stored_blocks: int
    declined_blocks: Mapping[str, int]
    missed_blocks: Mapping[str, int]
    loaded_blocks: Mapping[str, int]
    evicted_blocks: Mapping[str, int]
    host_slots: int
    benefit: BenefitResult
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A token that differs, or whose log-probability does; None if one answer is shorter."""

    conversation: int
    turn: int
    place: int
    token_without: int | None
    token_with: int | None
    logprob_without: float | None
    logprob_with: float | None

    def __str__(self) -> str:
        where = f"conversation {self.conversation}, turn {self.turn}, token {self.place}"
        if self.token_without is None:
            return f"{where}: one of the two answers ends here"
        without = f"{self.token_without} ({self.logprob_without:.6f})"
        return f"{where}: {without} without offloading, {self.token_with} ({self.logprob_with:.6f}) with it"


@dataclass(frozen=True, slots=True)
class Agreement:
    """The comparison of the outputs.

    Args:
        tokens: how many were compared.
        mismatches: how many do not agree.
        first_mismatches: the first of them.
        worst_logprob_difference: over all pairs of tokens.
        logprob_limit: what is allowed.
    """

    tokens: int
    mismatches: int
    first_mismatches: tuple[Mismatch, ...]
    worst_logprob_difference: float
    logprob_limit: float

    @property
    def holds(self) -> bool:
        return not self.mismatches


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a demo.

    Args:
        workload: what was played.
        without_offloading, with_offloading: the two plays.
        returning_ttft_ratio: median time to first token of returning turns, without over with.
        offloading: what kvoffload counted.
        agreement: whether the outputs are the same.
        broken_laws: what the audits found, as text.
        provenance: what ran, where and when.
    """

    workload: Workload
    without_offloading: PlayResult
    with_offloading: PlayResult
    returning_ttft_ratio: float | None
    offloading: OffloadResult
    agreement: Agreement
    broken_laws: tuple[str, ...]
    provenance: Mapping[str, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether outputs agree and no law is broken."""
        return self.agreement.holds and not self.broken_laws

    def to_json(self) -> str:
        """Return one object: the fields, `schema` and `passed`."""
        return to_json({"schema": SCHEMA, "kind": "demo", "passed": self.passed, **asdict(self)})


def to_json(values: Mapping[str, object]) -> str:
    """Return one object as text, with null for NaN, which JSON does not have."""
    return json.dumps(_finite(values), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
