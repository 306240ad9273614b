"""Writes the generated tables in the documents: settings, metrics, and the benches' most important results.

Usage: python .ci/readme.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from kvoffload.model.config import ADVANCED, SETTINGS, Setting
from kvoffload.telemetry.catalogue import CATALOGUE, Metric

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "host_bytes": "#how-much-host-memory",
    "host_path": "host-memory.md",
    "host_hugetlbfs": "host-memory.md#a-pool-of-huge-pages",
    "host_orphan_bytes": "host-memory.md#memory-of-stopped-engines",
    "verify": "#checksums",
    "disk_path": "disk.md",
    "remote_url": "store.md#two-kinds-of-store",
    "weights_id": "disk.md#which-engines-find-each-others-blocks",
    "tier_key_file": "store.md#a-key-for-disk-and-store",
    "journal_path": "watch.md#the-journal",
    "otlp_endpoint": "watch.md#spans",
    "recurrent_prefix_boundaries": "#models-with-recurrent-layers",
}
"""The section of docs/configure.md that describes a setting, for settings that have a section."""
BENCHES = ROOT / "tests" / "bench"
sys.path.append(str(ROOT))

from tests.bench.lines import markdown  # noqa: E402  # only a checkout has the tests


def filled(text: str, name: str, content: str) -> str:
    """Return `text` with `content` between the marks `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: a mark is missing or occurs more than once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}{content.strip()}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"there are {count} places for {name!r}; there must be one")
    return text


def settings_tables() -> str:
    """Return the two tables of docs/configure.md."""
    common = [item for item in SETTINGS.items() if item[0] not in ADVANCED]
    advanced = [item for item in SETTINGS.items() if item[0] in ADVANCED]
    about = "**Advanced:** leave these as they are unless you work around a problem."
    return f"{_settings_table(common)}\n\n{about}\n\n{_settings_table(advanced)}"


def _settings_table(settings: list[tuple[str, Setting]]) -> str:
    rows = [
        f"| {_linked(name)} | {_breakable(one.default)} | {one.meaning} | {_breakable(one.allowed)} |"
        for name, one in settings
    ]
    return "\n".join(["| key | default | meaning | values |", "|---|---|---|---|", *rows])


def _breakable(text: str) -> str:
    """Return a text with its long words as code, which the site breaks if a column is narrow."""
    return re.sub(r'"\S{12,}"|[A-Z_]{20,}', r"`\g<0>`", text)


def _linked(name: str) -> str:
    page = PAGES.get(name)
    return f"[`{name}`]({page})" if page else f"`{name}`"


def metrics_table() -> str:
    """Return the table of dashboards/metrics.md."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind.value} | {_labels_of(metric)} | {metric.help} |"
        for metric in CATALOGUE
    ]
    return "\n".join(rows)


def _labels_of(metric: Metric) -> str:
    # The site breaks code, so that the column can be narrow.
    return "; ".join(
        f"`{label.name}`: {', '.join(f'`{value}`' for value in label.values)}" for label in metric.labels
    )


def main() -> int:
    stale = False
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((BENCHES / "results").glob("*.json"))
    ]
    for path, name, content in (
        (ROOT / "docs" / "configure.md", "settings", settings_tables()),
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
