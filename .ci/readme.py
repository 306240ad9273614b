"""Writes the generated parts of README.md anew: the metrics, from the catalogue that the exporters use, and the benches.

Usage: python .ci/readme.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvoffload.bench import summary
from kvoffload.telemetry.catalogue import render_markdown

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "kvoffload" / "bench" / "results"


def filled(text: str, name: str, content: str) -> str:
    """Return `text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced.

    Raises:
        ValueError: the marks are not there, once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}{content.strip()}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"README.md has {count} places for {name!r}; it must have one")
    return text


def main() -> int:
    text = README.read_text(encoding="utf-8")
    wanted = filled(text, "metrics", render_markdown())
    wanted = filled(wanted, "benches", summary.render(RESULTS))
    if "--check" in sys.argv:
        return int(text != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
