"""A journal as a page."""

from __future__ import annotations

from kvoffload.cli.report import figures
from kvoffload.cli.report.account import Account, by_label
from kvoffload.cli.report.page import Page, size_of
from kvoffload.model.transfer import Direction
from kvoffload.telemetry.journal import JournalError

SLOTS_BY_EVENTS = "As events tell it: a slot counts as pinned while a load reads it."
_UNKNOWN = (
    "A journal does not know: times to first token, what the same run takes without offloading, and whether outputs are "
    "the same. `kvoffload demo --report` measures all three."
)


def journal_page(name: str, account: Account, problem: JournalError | None) -> Page:
    """Return the page of a journal that is called `name`."""
    notes = [_UNKNOWN]
    if account.dropped_lines:
        notes.append(f"{account.dropped_lines:,} lines are missing: they were told faster than written.")
    if account.processes > 1:
        notes.append(f"{account.processes} processes wrote this journal, one after the other.")
    if problem is not None:
        notes.append(f"The journal ends early, at line {problem.line}: {problem.problem}")
    is_whole = problem is None and not account.dropped_lines
    return Page(
        title=f"KV-cache offloading: {name}",
        verdict="" if is_whole else "The journal is not complete; totals are of what it holds.",
        is_good=is_whole,
        lines=[_head(account)],
        tiles=_tiles(account),
        figures=[
            figures.hit_ratio(account),
            figures.occupancy(account, SLOTS_BY_EVENTS),
            figures.misses(account),
            figures.transfers(account),
        ],
        table=None,
        notes=notes,
    )


def _head(account: Account) -> str:
    counts = account.events
    return (
        f"{account.lines:,} lines over {account.seconds:,.1f} s, {counts['StepScheduled']:,} steps, "
        f"{counts['RequestSeen']:,} requests"
    )


def _tiles(account: Account) -> dict[str, str]:
    found = sum(one.device_tokens + one.host_tokens for one in account.lookups)
    asked = found + sum(one.missed_tokens for one in account.lookups)
    stored, loaded = (by_label(account.counted, f"kvoffload_{way}_blocks_total") for way in ("store", "load"))
    return {
        "prompt tokens found": f"{found / asked:.1%}" if asked else "-",
        "found on the host": f"{sum(one.host_tokens for one in account.lookups):,}",
        "blocks stored": f"{stored.get('stored', 0):,}",
        "blocks loaded": f"{loaded.get('loaded', 0):,}",
        "bytes stored": size_of(account.copied_bytes(Direction.STORE)),
        "bytes loaded": size_of(account.copied_bytes(Direction.LOAD)),
        "blocks evicted": f"{account.counted.total('kvoffload_evicted_blocks_total'):,}",
    }
