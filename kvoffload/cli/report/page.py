"""A page around figures. It is complete in itself: no script, no font or picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvoffload.cli.report.figures import COLOURS, HEIGHT, WIDTH, Bars, Figure, Table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_SWATCH = '<svg viewBox="0 0 1 1" aria-hidden="true"><rect class="c-{}" width="1" height="1"/></svg>'


@dataclass(frozen=True, slots=True)
class Page:
    """A page's content, as plain text.

    Args:
        title: its heading.
        verdict: the most important fact; may be empty.
        is_good: whether the verdict is good.
        lines: what ran, and where.
        tiles: the most important numbers, by name.
        figures: the plots.
        table: numbers side by side, None for none.
        notes: limits of what the page shows.
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
    """Return the page as HTML. What is no Unicode, such as a path's bytes that are not UTF-8, is written as an escape."""
    text = "\n".join([*_head(page), *_body(page), "</main></body></html>", ""])
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _head(page: Page) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(page.title)}</title>"
    yield f"<style>{_stylesheet()}</style></head>"


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
            f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"><title id="{name}-title">{escape(figure.title)}</title>'
            f'<desc id="{name}-text">{escape(figure.summary)}</desc>{figure.shapes}</svg>'
        )
        times = "".join(f'<b style="left:{tick.share:.2%}">{escape(tick.label)}</b>' for tick in figure.times)
        yield f'<div class="x" aria-hidden="true">{times}</div></div>'
    else:
        yield '<p class="none">No data.</p>'
    yield f"<p>{escape(figure.summary)}</p>"
    if figure.table.rows:
        yield f"<details><summary>Numbers</summary>{_table(figure.table, figure.title)}</details>"
    yield "</figure>"


def _bars(bars: Bars) -> Iterator[str]:
    name = escape(bars.name)
    yield from _caption(name, bars.title, bars.text)
    most = max(bars.numbers.values(), default=0)
    if not most:
        yield '<p class="none">No data.</p></figure>'
        return
    yield '<ul class="bars">'
    for key, number in bars.numbers.items():
        label = escape(key.replace("_", " "))
        bar = f'<progress max="{most}" value="{number}" aria-label="{label}"></progress>'
        yield f"<li><span>{label}</span><b>{number:,}</b>{bar}</li>"
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
    items = "".join(f"<li>{_SWATCH.format(key)}{escape(label)}</li>" for key, label in legend.items())
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


# -- style: one column, light and dark by the reader's own setting, readable from 320 pixels on --------------------

_LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "ink": "#1b1f24", "quiet": "#56606b", "line": "#d8dde3", "focus": "#0b57d0",
    "good": "#1e7a2e", "bad": "#b3261e", "edge": "#4a525b",
}  # fmt: skip
_DARK = {
    "page": "#14171b", "card": "#1d2126", "ink": "#e8ebee", "quiet": "#a8b1bb", "line": "#353c44", "focus": "#8ab4f8",
    "good": "#7fd18b", "bad": "#ff8a80", "edge": "#c3cad2",
}  # fmt: skip

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;color-scheme:light dark}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:70rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0}
p{margin:.25rem 0;color:var(--quiet);overflow-wrap:anywhere}
.verdict{font-weight:600;color:var(--good)}
.verdict.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.75rem;margin:1rem 0;padding:0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.6rem .8rem;min-width:0}
.tiles dt{color:var(--quiet);font-size:.85rem;line-height:1.3}
.tiles dd{margin:.15rem 0 0;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1rem;margin:0 0 1rem}
figure,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;margin:0;padding:1rem;min-width:0}
figure:focus-visible,summary:focus-visible,.wide:focus-visible{outline:3px solid var(--focus);outline-offset:2px}
figure p{font-size:.9rem}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1rem;list-style:none;margin:.5rem 0;padding:0;font-size:.85rem}
.legend svg{width:.8rem;height:.8rem;margin-right:.4rem;vertical-align:-.05rem}
.plot{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.25rem .5rem;margin:.5rem 0;font-size:.75rem;color:var(--quiet)}
.unit{grid-column:1/-1;margin-bottom:.35rem}
.y{position:relative;display:grid;font-variant-numeric:tabular-nums;text-align:right}
.y span{grid-area:1/1;visibility:hidden}
.y b{position:absolute;right:0;font-weight:400;transform:translateY(50%);white-space:nowrap}
.plot>svg{width:100%;height:13rem;display:block;overflow:visible}
.x{grid-column:2;position:relative;height:1.5em;font-variant-numeric:tabular-nums}
.x b{position:absolute;font-weight:400;transform:translateX(-50%);white-space:nowrap}
.bars{list-style:none;margin:.5rem 0;padding:0;font-size:.9rem}
.bars li{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:0 .75rem;margin:.4rem 0}
.bars b{font-weight:600;font-variant-numeric:tabular-nums}
.bars progress{grid-column:1/-1;width:100%;height:.7rem;accent-color:#9a9a9a}
.none{padding:2rem 0;text-align:center}
details{margin-top:.5rem;font-size:.85rem}
summary{cursor:pointer;color:var(--quiet)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .5rem .25rem 0;border-bottom:1px solid var(--line);text-align:right;font-weight:400}
th:first-child,td:first-child{text-align:left}
thead th{color:var(--quiet);vertical-align:bottom}
rect{stroke:var(--edge);stroke-width:.5;vector-effect:non-scaling-stroke}
.line{fill:none;stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.line.level{stroke-width:2.5}
.dot{fill:none;stroke-width:6;stroke-linecap:round;vector-effect:non-scaling-stroke;opacity:.75}
footer{font-size:.85rem}
"""


def _stylesheet() -> str:
    names = [
        f".c-{key}{{fill:{colour}}}.dot.c-{key},.level.c-{key}{{fill:none;stroke:{colour}}}"
        for key, colour in COLOURS.items()
    ]
    dark = f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    return f":root{{{_variables(_LIGHT)}}}{dark}{_RULES}{''.join(names)}"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
