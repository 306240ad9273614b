"""Runs the suite beside this file on several versions of vLLM, and writes the table in plugins/kvoffload_vllm/README.md.

One pytest process a version, with that version's Python files in front of the installed vLLM. Fails where a test fails,
or, with --check, where that table is not what came out.

    .venv/vllm/bin/python -m tests.vllm_versions.matrix [--check] [--jobs 2] [0.28.0 ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.tooling.scripts import ROOT, load_script
from tests.vllm_stock import install

SUITE = "tests/vllm_versions"
MORE = (
    "tests/vllm_adapter/test_on_vllm.py",
    "tests/vllm_adapter/test_layout_on_engine.py",
    "tests/vllm_adapter/test_news_on_vllm.py",
)
"""What else is run where the connector starts: that memory, keys, metrics and events are translated rightly."""

TOO_OLD = ("0.27.1",)
"""Run to see that the connector refuses to start, and says with what it works."""

REFUSED = "refused at start"
SCENES = {
    "reload": "reloaded",
    "preemption": "preempted",
    "abort": "aborted",
    "reset": "reset",
    "failed load": "failed",
}
COLUMNS: Mapping[str, tuple[str, ...]] = {
    **{
        title: (rf"test_scene\[qwen3-{scene}\]", rf"test_control\[qwen3-{scene}\]")
        for title, scene in SCENES.items()
    },
    "all these, hybrid model": tuple(
        rf"test_{part}\[gemma3-{scene}\]" for scene in SCENES.values() for part in ("scene", "control")
    ),
    "layouts, metrics, events": ("tests/vllm_adapter/.*",),
}
"""Each column's title, and the tests that it stands for: every pattern must be met."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of the tests on one version.

    Args:
        version: of vLLM.
        passed: whether no test failed, and one ran.
        results: by test, "passed", "failed", or the reason for which it was skipped.
        output: what pytest printed.
    """

    version: str
    passed: bool
    results: Mapping[str, str]
    output: str

    def cells(self) -> list[str]:
        """Return the version's row of the table."""
        return [self.version, *(self._cell(patterns) for patterns in COLUMNS.values())]

    def _cell(self, patterns: Sequence[str]) -> str:
        said = {self._said(pattern) for pattern in patterns}
        if len(said) == 1:
            return said.pop()
        return "failed" if "failed" in said else "not run"

    def _said(self, pattern: str) -> str:
        """What is true of a pattern's tests. Of several, some skip what this version does not have."""
        met = {result for test, result in self.results.items() if re.fullmatch(pattern, test)}
        if "failed" in met or met == {REFUSED}:
            return "failed" if "failed" in met else REFUSED
        return "passed" if "passed" in met else "not run"


def versions() -> list[str]:
    """The versions that the lock names."""
    return sorted([installed(), *install.overlay_versions()], key=lambda one: [*map(int, one.split("."))])


def installed() -> str:
    """The version that is installed whole, and that all other tests run on."""
    (found,) = (pin.removeprefix("vllm==") for pin in install.pins() if pin.startswith("vllm=="))
    return found


def run(version: str) -> Ran:
    """Run the suite on one version."""
    overlay = [] if version == installed() else [str(install.OVERLAYS / version)]
    path = os.pathsep.join(filter(None, [*overlay, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "KVOFFLOAD_VLLM": version}
    with tempfile.TemporaryDirectory(prefix="kvoffload-versions-") as scratch:
        result = Path(scratch) / "results.xml"
        tests = [SUITE, *(() if version in TOO_OLD else MORE)]
        options = ["-m", "vllm", "-q", f"--junit-xml={result}", f"--basetemp={scratch}/tests"]
        options += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results = read_results(result.read_text()) if result.exists() else {}
    return Ran(version, done.returncode == 0, results, done.stdout)


def read_results(junit: str) -> dict[str, str]:
    """Return what came of each test: of the suite by its name, of the others by file and name."""
    results = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        file = case.get("file", "")
        name = case.get("name", "") if file.startswith(SUITE) else f"{file}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            results[name] = "failed"
        else:
            results[name] = skipped.get("message", "skipped") if skipped is not None else "passed"
    return results


def render(rows: Sequence[Sequence[str]]) -> str:
    """Return the table in Markdown."""
    lines = [["vLLM", *COLUMNS], ["---"] * (len(COLUMNS) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Return the page with the table in its place."""
    text: str = load_script("readme").filled(page, "versions", render(rows))
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="run the smaller suite on several versions of vLLM")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the table is stale")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="versions at a time")
    parser.add_argument("versions", nargs="*", help="some of the lock's; the table is left alone then")
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.jobs) as pool:
        ran = list(pool.map(_run_and_tell, asked.versions or versions()))
    rows = [one.cells() for one in ran]
    sys.stdout.write(f"\n{render(rows)}\n")
    if not all(one.passed for one in ran):
        return 1
    return 0 if asked.versions else _settle(rows, check=asked.check)


def _run_and_tell(version: str) -> Ran:
    began = time.monotonic()
    ran = run(version)
    words = ran.output if not ran.passed else (ran.output.splitlines() or [""])[-1]
    sys.stdout.write(f"vLLM {version}: {words} ({time.monotonic() - began:.0f} s in all)\n")
    sys.stdout.flush()
    return ran


def _settle(rows: Sequence[Sequence[str]], *, check: bool) -> int:
    """Write the table, or say whether it is this one."""
    page = ROOT / "plugins" / "kvoffload_vllm" / "README.md"
    text = page.read_text(encoding="utf-8")
    wanted = filled(text, rows)
    if check and wanted != text:
        sys.stdout.write(
            "the table of versions in plugins/kvoffload_vllm/README.md is not what came out: make vllm-versions\n"
        )
        return 1
    if wanted != text:
        page.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
