"""The page's style: one column, light and dark by the reader's own setting, readable from 320 pixels on."""

from __future__ import annotations

from kvoffload.cli.report.colours import COLOURS
from kvoffload.cli.report.plots import class_of

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
.x{grid-column:2;display:flex;justify-content:space-between;font-variant-numeric:tabular-nums}
.bars{list-style:none;margin:.5rem 0;padding:0;font-size:.9rem}
.bars li{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:0 .75rem;margin:.4rem 0}
.bars b{font-weight:600;font-variant-numeric:tabular-nums}
.bars svg{grid-column:1/-1;width:100%;height:.7rem;display:block}
.none{padding:2rem 0;text-align:center}
details{margin-top:.5rem;font-size:.85rem}
summary{cursor:pointer;color:var(--quiet)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .5rem .25rem 0;border-bottom:1px solid var(--line);text-align:right;font-weight:400}
th:first-child,td:first-child{text-align:left}
thead th{color:var(--quiet);vertical-align:bottom}
rect,.area{stroke:var(--edge);stroke-width:.5;vector-effect:non-scaling-stroke}
.line{fill:none;stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.line.zero{stroke:var(--edge)}
.line.level{stroke-width:2.5}
.line.c-capacity{stroke:var(--edge);stroke-width:1.5;stroke-dasharray:6 4}
.dot{fill:none;stroke-width:6;stroke-linecap:round;vector-effect:non-scaling-stroke;opacity:.75}
footer{font-size:.85rem}
"""


def stylesheet() -> str:
    """Return the page's whole style."""
    names = [
        f".{name}{{fill:{colour}}}.dot.{name},.level.{name}{{fill:none;stroke:{colour}}}"
        for name, colour in ((class_of(key), colour) for key, colour in COLOURS.items())
    ]
    dark = f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    return f":root{{{_variables(_LIGHT)}}}{dark}{_RULES}{''.join(names)}"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
