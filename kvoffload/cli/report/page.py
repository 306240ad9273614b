"""One page around its figures, that needs nothing but itself: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvoffload.cli.report import plots
from kvoffload.cli.report.figures import Bars, Figure, Table
from kvoffload.cli.report.style import stylesheet

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_SWATCH = '<svg viewBox="0 0 1 1" aria-hidden="true"><rect class="{}" width="1" height="1"/></svg>'


@dataclass(frozen=True, slots=True)
class Page:
    """Everything a page says, as plain text.

    Args:
        title: its heading.
        verdict: the first thing to know; empty for nothing.
        is_good: whether that is as it should be.
        lines: what was run.
        tiles: the numbers that matter most, by what they are.
        figures: the plots.
        table: numbers side by side, None for none.
        notes: what the page does not know.
    """

    title: str
    verdict: str
    is_good: bool
    lines: Sequence[str]
    tiles: Mapping[str, str]
    figures: Sequence[Figure | Bars]
    table: Table | None
    notes: Sequence[str]


def render(page: Page) -> str:
    """Return the page as HTML."""
    return "\n".join([*_head(page), *_body(page), "</main></body></html>", ""])


def _head(page: Page) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(page.title)}</title>"
    yield f"<style>{stylesheet()}</style></head>"


def _body(page: Page) -> Iterator[str]:
    yield f"<body><main><header><h1>{escape(page.title)}</h1>"
    if page.verdict:
        yield f'<p class="verdict{"" if page.is_good else " bad"}">{escape(page.verdict)}</p>'
    yield from (f"<p>{escape(line)}</p>" for line in page.lines)
    yield "</header>"
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.tiles.items()
    )
    yield f'<dl class="tiles">{tiles}</dl><div class="figures">'
    for figure in page.figures:
        yield from _bars(figure) if isinstance(figure, Bars) else _figure(figure)
    if page.table is not None:
        yield f"<section><h2>Side by side</h2>{_table(page.table, 'side by side')}</section>"
    yield "</div><footer>"
    yield from (f"<p>{escape(note)}</p>" for note in page.notes)
    yield "</footer>"


def _figure(figure: Figure) -> Iterator[str]:
    name = escape(figure.name)
    yield from _caption(name, figure.title, figure.text)
    if figure.shapes:
        yield _legend(figure.legend)
        yield '<div class="plot">'
        yield f'<span class="unit" aria-hidden="true">{escape(figure.unit)}</span>'
        yield f'<div class="y" aria-hidden="true">{_marks(figure)}</div>'
        yield (
            f'<svg role="img" aria-labelledby="{name}-title {name}-text" preserveAspectRatio="none" '
            f'viewBox="0 0 {plots.WIDTH:g} {plots.HEIGHT:g}"><title id="{name}-title">{escape(figure.title)}</title>'
            f'<desc id="{name}-text">{escape(figure.summary)}</desc>{figure.shapes}</svg>'
        )
        times = "".join(f"<span>{escape(time)}</span>" for time in figure.times)
        yield f'<div class="x" aria-hidden="true">{times}</div></div>'
    else:
        yield '<p class="none">Nothing of this happened.</p>'
    yield f"<p>{escape(figure.summary)}</p>"
    if figure.table.rows:
        yield f"<details><summary>Numbers</summary>{_table(figure.table, figure.title)}</details>"
    yield "</figure>"


def _bars(bars: Bars) -> Iterator[str]:
    name = escape(bars.name)
    yield from _caption(name, bars.title, bars.text)
    most = max(bars.numbers.values(), default=0)
    if not most:
        yield '<p class="none">Nothing of this happened.</p></figure>'
        return
    yield '<ul class="bars">'
    for key, number in bars.numbers.items():
        label = escape(key.replace("_", " "))
        yield (
            f"<li><span>{label}</span><b>{number:,}</b>"
            f'<svg role="img" aria-label="{label}: {number:,} {escape(bars.unit)}" preserveAspectRatio="none" '
            f'viewBox="0 0 {plots.WIDTH:g} {plots.HEIGHT:g}">{plots.bar(key, number / most)}</svg></li>'
        )
    yield f"</ul><p>{sum(bars.numbers.values()):,} {escape(bars.unit)} in all.</p>"
    rows = tuple((key.replace("_", " "), f"{number:,}") for key, number in bars.numbers.items())
    table = _table(Table(("cause", bars.unit), rows), bars.title)
    yield f"<details><summary>Numbers</summary>{table}</details></figure>"


def _caption(name: str, title: str, text: str) -> Iterator[str]:
    yield f'<figure id="{name}" tabindex="0" aria-labelledby="{name}-head"><figcaption>'
    yield f'<h2 id="{name}-head">{escape(title)}</h2><p>{escape(text)}</p></figcaption>'


def _marks(figure: Figure) -> str:
    # The widest label, unseen, makes room for all of them, which are placed by their share of the height.
    room = max((escape(tick.label) for tick in figure.ticks), key=len, default="")
    marks = "".join(f'<b style="bottom:{tick.share:.2%}">{escape(tick.label)}</b>' for tick in figure.ticks)
    return f"<span>{room}</span>{marks}"


def _legend(legend: Mapping[str, str]) -> str:
    items = "".join(
        f"<li>{_SWATCH.format(plots.class_of(key))}{escape(label)}</li>" for key, label in legend.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _table(table: Table, name: str) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(name)}, numbers"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
