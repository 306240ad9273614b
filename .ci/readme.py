"""Writes the generated tables of the documents: the metrics from the catalogue, and the headlines of the benches.

Usage: python .ci/readme.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from kvoffload.telemetry.catalogue import CATALOGUE, Metric

ROOT = Path(__file__).resolve().parent.parent
BENCHES = ROOT / "tests" / "bench"
sys.path.append(str(ROOT))

from tests.bench.lines import markdown  # noqa: E402  # only a checkout has the tests


def filled(text: str, name: str, content: str) -> str:
    """Return `text` with the part between `<!-- name -->` and `<!-- /name -->` replaced.

    Raises:
        ValueError: the marks do not occur exactly once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}{content.strip()}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"there are {count} places for {name!r}; there must be one")
    return text


def metrics_table() -> str:
    """Return the table of dashboards/metrics.md."""
    rows = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {_labels_of(metric)} | {metric.help} |"
        for metric in CATALOGUE
    ]
    return "\n".join(rows)


def _labels_of(metric: Metric) -> str:
    return "; ".join(f"`{label.name}`: {', '.join(label.values)}" for label in metric.labels)


def main() -> int:
    stale = False
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((BENCHES / "results").glob("*.json"))
    ]
    for path, name, content in (
        (ROOT / "dashboards" / "metrics.md", "metrics", metrics_table()),
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
