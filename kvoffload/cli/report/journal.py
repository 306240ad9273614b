"""A journal as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvoffload.cli.journal_lines import Lines
from kvoffload.cli.report import figures
from kvoffload.cli.report.account import Account, by_label
from kvoffload.cli.report.page import Page
from kvoffload.model.causes import Found
from kvoffload.model.config import size_text
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.labels import Answer
from kvoffload.telemetry.provenance import as_line

_SLOTS_BY_EVENTS = "Derived from events: a slot counts as pinned while a load reads it."
_UNKNOWN = (
    "A journal does not say how long the same run takes without offloading, nor whether outputs are the same. "
    "`kvoffload demo --report` measures both."
)


def journal_page(account: Account, lines: Lines) -> Page:
    """Return the page of a journal whose lines have been added up."""
    is_whole = lines.problem is None and not account.dropped_lines
    return Page(
        title=f"KV-cache offloading: {lines.path.name}",
        verdict="" if is_whole else "The journal is not complete; totals are of the lines it has.",
        is_good=is_whole,
        lines=[*describe(lines.provenance), _head(account), *_part(lines)],
        tiles=_tiles(account),
        figures=[
            figures.first_token_times(account),
            figures.hit_ratio(account),
            figures.occupancy(account, _SLOTS_BY_EVENTS),
            figures.transfers(account),
            *figures.lower_transfers(account),
            figures.misses(account),
            figures.stores(account),
        ],
        table=None,
        notes=list(_notes(account, lines)),
    )


def describe(provenance: Mapping[str, object]) -> Iterator[str]:
    """Yield what ran, where and when, and with which settings."""
    if not provenance:
        yield "The journal does not say what wrote it: its first line is missing."
        return
    yield as_line(provenance)
    sizes = [f"ranks: {provenance.get('ranks')}", f"device blocks: {provenance.get('device_blocks')}"]
    groups = provenance.get("groups")
    sizes += [f"group: {group}" for group in groups] if isinstance(groups, list) else []
    settings = provenance.get("settings")
    if isinstance(settings, Mapping):
        sizes += [_setting(name, value) for name, value in settings.items() if value is not None]
    yield "; ".join(sizes)


def _setting(name: str, value: object) -> str:
    return f"{name} {size_text(value) if isinstance(value, int) and 'bytes' in name else value}"


def _part(lines: Lines) -> list[str]:
    return [f"Only a part of the journal: {lines.words}."] if lines.words else []


def _notes(account: Account, lines: Lines) -> Iterator[str]:
    yield _UNKNOWN
    if account.dropped_lines:
        yield f"{account.dropped_lines:,} lines are missing: the feed dropped them, or they were removed from the file."
    if account.first_sequence > 1:
        yield (
            f"The first line is number {account.first_sequence:,}: earlier ones were rotated away or skipped. Host slots are "
            "counted from there on."
        )
    if account.processes > 1:
        yield f"{account.processes} processes wrote this journal, one after the other."
    if lines.problem is not None:
        yield f"The journal ends early, at line {lines.problem.line}: {lines.problem.problem}"


def _head(account: Account) -> str:
    counts = account.events
    return (
        f"{account.lines:,} lines over {account.seconds:,.1f} s, {counts['StepScheduled']:,} steps, "
        f"{counts['RequestSeen']:,} requests"
    )


def _tiles(account: Account) -> dict[str, str]:
    host = sum(one.host_tokens for one in account.lookups)
    found = host + sum(one.device_tokens for one in account.lookups)
    asked = found + sum(one.missed_tokens for one in account.lookups)
    stored, loaded = (by_label(account.counted, f"kvoffload_{way}_blocks_total") for way in ("store", "load"))
    return {
        "first token p50, found on the host": figures.median_ms(account, Found.HOST),
        "first token p50, nothing found": figures.median_ms(account, Found.NOTHING),
        "prompt tokens found": f"{found / asked:.1%}" if asked else "-",
        "prefill tokens avoided": f"{host:,}",
        "blocks stored": f"{stored.get('stored', 0):,}",
        "blocks loaded": f"{loaded.get('loaded', 0):,}",
        "bytes stored, loaded": _bytes(account, Tier.HOST),
        **_below(account),
    }


def _below(account: Account) -> dict[str, str]:
    """Return the tiles of the tiers below the host that the journal has copies of."""
    tiles: dict[str, str] = {}
    if account.uses(Tier.DISK):
        tiles["first token p50, found on the disk"] = figures.median_ms(account, Found.DISK)
        tiles["bytes written to, read from disk"] = _bytes(account, Tier.DISK)
    if asked := account.asked.total():
        tiles["first token p50, found in the store"] = figures.median_ms(account, Found.REMOTE)
        tiles["bytes written to, read from store"] = _bytes(account, Tier.REMOTE)
        tiles["blocks asked for that the store had"] = f"{account.asked[Answer.FOUND] / asked:.1%}"
        fetched = account.counted.count("kvoffload_fetched_tokens_total", Tier.REMOTE.value)
        tiles["tokens fetched from the store"] = f"{fetched:,}"
    return tiles


def _bytes(account: Account, tier: Tier) -> str:
    ways = (Direction.STORE, Direction.LOAD)
    return " / ".join(size_text(account.copied_bytes(way, tier)) for way in ways)
