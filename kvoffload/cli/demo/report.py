"""The demo's result as a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvoffload.cli.demo.results import DemoResult
from kvoffload.cli.demo.table import NOTE, compared, head
from kvoffload.cli.report import figures
from kvoffload.cli.report.figures import Sample, Table
from kvoffload.cli.report.journal import describe
from kvoffload.cli.report.page import Page
from kvoffload.model.config import size_text

if TYPE_CHECKING:
    from kvoffload.cli.demo.play import Play
    from kvoffload.cli.report.account import Account

_TIMES = (
    "Plots over time show the engine with offloading since the end of its warm-up. Rounds alternate between the engine "
    "without and the one with it: in the gaps the other engine works."
)


def demo_page(result: DemoResult, without: Play, with_: Play, account: Account) -> Page:
    """Return the page; `account` covers the engine with offloading since the end of its warm-up."""
    return Page(
        title="KV-cache offloading: the same conversations without and with it",
        verdict=_verdict(result),
        is_good=result.passed,
        lines=[*head(result.workload), *describe(result.provenance)],
        tiles=_tiles(result),
        figures=[
            figures.first_tokens([*_samples(without, is_with=False), *_samples(with_, is_with=True)]),
            figures.hit_ratio(account),
            figures.occupancy(account, "As it was whenever it changed."),
            figures.transfers(account),
            *figures.lower_transfers(account),
            figures.misses(account),
            figures.stores(account),
        ],
        table=Table(("", "without", "with"), tuple(compared(result))),
        notes=[NOTE, _TIMES, *result.broken_laws],
    )


def _verdict(result: DemoResult) -> str:
    agreement = result.agreement
    if result.broken_laws:
        return f"FAILED: {len(result.broken_laws)} laws are broken"
    if not agreement.holds:
        return f"FAILED: {agreement.mismatches:,} of {agreement.tokens:,} tokens differ"
    return f"All {agreement.tokens:,} tokens agree, and every block, pin, lease and copy is accounted for"


def _tiles(result: DemoResult) -> dict[str, str]:
    offloading, benefit = result.offloading, result.offloading.benefit
    ratio, share = result.returning_ttft_ratio, result.with_offloading.returning_reused_share
    return {
        "returning turns: first token sooner by": "-" if ratio is None else f"{ratio:.1f}x",
        "reused of what can be": "-" if share is None else f"{share:.1%}",
        "net seconds saved, as estimated": f"{benefit.net_s:.1f}",
        "blocks stored": f"{offloading.stored_blocks:,}",
        "blocks loaded": f"{offloading.loaded_blocks.get('loaded', 0):,}",
        "moved to the host": size_text(offloading.stored_bytes),
        "moved back": size_text(offloading.loaded_bytes),
    }


def _samples(play: Play, *, is_with: bool) -> Iterator[Sample]:
    for turn in play.turns:
        yield Sample(is_with, turn.turn.turn == 0, turn.ttft_s)
