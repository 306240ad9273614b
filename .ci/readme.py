"""Writes the generated tables of the documents: the metrics, from the exporters' catalogue, and the headlines of the benches.

Usage: python .ci/readme.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from kvoffload.telemetry.catalogue import render_markdown

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ROOT / "tests" / "bench"
sys.path.append(str(ROOT))

from tests.bench.lines import markdown  # noqa: E402  # only a checkout has the tests


def filled(text: str, name: str, content: str) -> str:
    """Return `text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced.

    Raises:
        ValueError: the marks do not occur exactly once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}{content.strip()}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"there are {count} places for {name!r}; there must be one")
    return text


def main() -> int:
    stale = False
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((BENCHES / "results").glob("*.json"))
    ]
    for path, name, content in (
        (ROOT / "dashboards" / "metrics.md", "metrics", render_markdown()),
        (BENCHES / "README.md", "benches", markdown(results)),
    ):
        text = path.read_text(encoding="utf-8")
        wanted = filled(text, name, content)
        stale |= text != wanted
        if "--check" not in sys.argv:
            path.write_text(wanted, encoding="utf-8")
    return int(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
