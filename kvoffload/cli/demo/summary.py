"""Computes results from turns and counters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvoffload.cli.demo.conversations import UnlimitedCache
from kvoffload.cli.demo.play import Play, Turn
from kvoffload.cli.demo.results import BenefitResult, OffloadResult, PlayResult, Quantiles
from kvoffload.cli.report.account import by_label
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.transfer import Direction, Tier

if TYPE_CHECKING:
    from kvoffload.telemetry.snapshot import Snapshot

_HOST, _DISK = Tier.HOST.value, Tier.DISK.value

Numbers = Mapping[str, Mapping[tuple[str, ...], float]]


def summarize(play: Play, block_tokens: int) -> PlayResult:
    """Return the result of one play."""
    stats = [turn.stats for turn in play.turns]
    returning = [turn for turn in play.turns if turn.turn.turn > 0]
    reusable, reused = _reuse(play.turns, block_tokens)
    prompt, generated = (sum(s.prompt_tokens for s in stats), sum(s.generated_tokens for s in stats))
    return PlayResult(
        prompt_tokens=prompt,
        generated_tokens=generated,
        computed_tokens=sum(s.computed_tokens for s in stats),
        device_tokens=sum(s.device_hit_tokens for s in stats),
        host_tokens=sum(s.external_tokens for s in stats),
        returning_reusable_tokens=reusable,
        returning_reused_tokens=reused,
        returning_reused_share=reused / reusable if reusable else None,
        first_ttft_s=quantiles([turn.ttft_s for turn in play.turns if turn.turn.turn == 0]),
        returning_ttft_s=quantiles([turn.ttft_s for turn in returning]) if returning else None,
        preemptions=sum(s.preemptions for s in stats),
        elapsed_s=play.elapsed_s,
        tokens_per_s=(prompt + generated) / play.elapsed_s,
    )


def quantiles(samples: Sequence[float]) -> Quantiles:
    """Return the median and the 99th percentile (nearest rank) of at least one sample."""
    ordered = sorted(samples)
    rank = math.ceil(0.99 * len(ordered))
    return Quantiles(len(ordered), statistics.median(ordered), ordered[rank - 1])


def summarize_offloading(counted: Snapshot, host_slots: int, benefit: BenefitResult) -> OffloadResult:
    """Return the result of offloading from its counters."""
    outcomes = by_label(counted, "kvoffload_store_blocks_total")
    stored = outcomes.pop(StoreOutcome.STORED.value, 0)
    return OffloadResult(
        stored_bytes=counted.count("kvoffload_transfer_bytes_total", _HOST, Direction.STORE.value),
        loaded_bytes=counted.count("kvoffload_transfer_bytes_total", _HOST, Direction.LOAD.value),
        offered_blocks=counted.total("kvoffload_offered_blocks_total"),
        stored_blocks=stored,
        declined_blocks=outcomes,
        missed_blocks=by_label(counted, "kvoffload_miss_blocks_total"),
        loaded_blocks=by_label(counted, "kvoffload_load_blocks_total"),
        evicted_blocks=by_label(counted, "kvoffload_evicted_blocks_total", _HOST),
        host_slots=host_slots,
        benefit=benefit,
        disk_written_bytes=counted.count("kvoffload_transfer_bytes_total", _DISK, Direction.STORE.value),
        disk_read_bytes=counted.count("kvoffload_transfer_bytes_total", _DISK, Direction.LOAD.value),
        disk_tokens=counted.count("kvoffload_fetched_tokens_total", _DISK),
    )


def summarize_benefit(before: Numbers, after: Numbers) -> BenefitResult:
    """Return the seconds saved and lost between two readings of `NetBenefit.series`."""

    def grown(name: str) -> float:
        return sum(after[name].values()) - sum(before[name].values())

    saved = grown("kvoffload_prefill_seconds_saved_total")
    waited = grown("kvoffload_load_wait_seconds_total")
    interference = grown("kvoffload_interference_seconds_total")
    return BenefitResult(saved, waited, interference, saved - waited - interference)


def _reuse(turns: Sequence[Turn], block_tokens: int) -> tuple[int, int]:
    """Return the reusable and the reused tokens of returning turns.

    Turns served at the same time belong to different conversations, which share nothing unless their texts do.
    """
    cache = UnlimitedCache(block_tokens)
    reusable = reused = 0
    for turn in turns:
        if turn.turn.turn > 0:
            reusable += cache.reusable_tokens(turn.prompt)
            reused += turn.stats.device_hit_tokens + turn.stats.external_tokens
        # The last token is returned, but its KV is never computed.
        cache.add([*turn.prompt, *(token.token_id for token in turn.answer[:-1])])
    return reusable, reused
