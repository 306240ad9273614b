"""`kvoffload report`: turns a journal into one HTML page that loads no other files, or into JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING

from kvoffload.cli.journal_lines import Lines, add_journal_arguments, opened
from kvoffload.cli.partial_file import STDOUT, written
from kvoffload.model.config import size_text

if TYPE_CHECKING:
    from kvoffload.cli.figures import Account, Figure

HELP = "show a journal as one page with figures, for any browser; needs the extra kvoffload[report]"

_SUFFIX = ".html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# The page follows the browser's light or dark theme. Wide figures and tables get a scroll bar.
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:0}p{margin:.25rem 0}
figure,section{margin:2rem 0;overflow-x:auto}
svg{width:100%;min-width:36rem;height:auto}
@media(prefers-color-scheme:dark){svg{filter:invert(.9) hue-rotate(180deg)}}
table{border-collapse:collapse}th,td{padding:.25rem 1rem .25rem 0;text-align:left;border-bottom:1px solid gray}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_journal_arguments(parser, _SUFFIX)
    words = "print the numbers as one JSON object instead, without figures; needs no extra"
    parser.add_argument("--json", action="store_true", help=words)


def run(args: argparse.Namespace) -> int:
    """Write the page or the JSON object.

    Raises:
        KVOffloadError: matplotlib is not installed, no line of the journal can be read, or the page cannot be written.
    """
    from kvoffload.cli.figures import add_up, check_installed

    if args.json:
        args.output = args.output or STDOUT
    else:
        check_installed()
    lines, output = opened(args, _SUFFIX)
    account = add_up(lines)
    text = as_json(account, lines) if args.json else render(account, lines)
    # Without `--request`, the output contains counts, sizes and times, but no request names.
    with written(output, is_private=args.request is not None) as file:
        file.write(text)
    return lines.report(output)


def as_json(account: Account, lines: Lines) -> str:
    """Return the provenance, the journal's gaps, the times to first token, the advice and the nonzero counters as JSON."""
    from kvoffload.cli.advise import advise, reading_of
    from kvoffload.cli.figures import first_token_ms, median_and_p99

    times = {}
    for found, samples in first_token_ms(account).items():
        if ordered := sorted(milliseconds for _, milliseconds in samples):
            median, p99 = median_and_p99(ordered)
            times[found] = {"requests": len(ordered), "p50": round(median, 6), "p99": round(p99, 6)}
    plain = {
        "provenance": lines.provenance,
        "events": lines.count,
        "seconds": round(lines.seconds, 3),
        "missing": lines.gaps,
        "problem": None if lines.problem is None else str(lines.problem),
        "first_token_ms": times,
        "advice": list(map(asdict, advise(reading_of(account)))),
        "counters": [
            {"metric": name, "labels": labels, "value": number} for name, labels, number in _numbers(account)
        ],
    }
    return json.dumps(plain, indent=1) + "\n"


def render(account: Account, lines: Lines) -> str:
    """Return the report as HTML. Bytes in the journal's path that are not valid UTF-8 appear as escapes."""
    from kvoffload.cli.advise import advise, reading_of
    from kvoffload.cli.figures import draw, verdict

    said = {sentence.about: sentence.text for sentence in advise(reading_of(account))}
    first = " ".join(filter(None, (verdict(account), said.pop("so_far", None))))
    title = escape(f"KV-cache offloading: {lines.path.name}")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p><strong>{escape(first)}</strong></p>",
        *(f"<p>{escape(line)}</p>" for line in _said(lines, account.ready_s)),
        f"<section><h2>Advice</h2>{''.join(f'<p>{escape(text)}</p>' for text in said.values())}</section>",
        *(_figure(number, figure) for number, figure in enumerate(draw(account))),
        f'<section tabindex="0" aria-label="counters"><h2>Counters</h2>{_table(_rows(account))}</section>',
        "</body></html>\n",
    ]
    return "\n".join(parts).encode("utf-8", "backslashreplace").decode("utf-8")


def _said(lines: Lines, ready_s: float | None) -> Iterator[str]:
    """Yield the page's first lines: the provenance, the settings, and the journal's size and gaps.

    Args:
        lines: the journal.
        ready_s: the time from which host memory could hold blocks; None if the journal does not say.
    """
    from kvoffload.telemetry.provenance import as_line

    provenance = lines.provenance
    if not provenance:
        yield "The journal does not say what wrote it: its first line is missing."
    else:
        yield as_line(provenance)
        settings = provenance.get("settings")
        if isinstance(settings, Mapping):
            yield "; ".join(
                f"{name} {_value(name, value)}" for name, value in settings.items() if value is not None
            )
    yield f"{lines.count:,} events over {lines.seconds:,.1f} s."
    if ready_s:
        yield f"Host memory had room for blocks from {ready_s:,.1f} s on. What came before, such as a warm-up, counts too."
    if lines.words:
        yield f"Only a part of the journal: {lines.words}."
    if lines.gaps:
        yield f"Events are missing: {lines.missing}."
    if lines.problem is not None:
        yield f"The journal ends early, at line {lines.problem.line}: {lines.problem.problem}"


def _value(name: str, value: object) -> str:
    """Return a setting's value as an operator writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and isinstance(value, int) and 0 <= value < 2**63:
        return size_text(value)
    return str(value)


def _figure(number: int, figure: Figure) -> str:
    title = escape(figure.title)
    drawing = f'<div role="img" aria-label="{title}">{figure.svg}</div>' if figure.svg else "<p>No data.</p>"
    return (
        f'<figure tabindex="0" aria-labelledby="figure-{number}"><figcaption><h2 id="figure-{number}">{title}</h2>'
        f"<p>{escape(figure.text)}</p></figcaption>{drawing}</figure>"
    )


def _numbers(account: Account) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield the name, labels and value of every counter that is not 0."""
    for name, series in account.counted.counts.items():
        for labels, number in series.items():
            if number:
                yield name, labels, number


def _rows(account: Account) -> Iterator[tuple[str, str, str]]:
    for name, labels, number in _numbers(account):
        yield name, ", ".join(labels), f"{number:,}"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
