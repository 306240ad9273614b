"""Runs this folder's tests on several versions of vLLM, and writes the table in plugins/kvoffload_vllm/README.md.

For each version and model runner, one pytest process runs with the version's Python files in front of the
installed vLLM. The program fails if a test fails.

* --check writes nothing, and also fails if the table is outdated. It skips the installed version, which `make
  test` covers. With runner V2, whose kernels are interpreted, it runs only a part of the tests.
* --starts, as in `make test`, runs only the scenes of one model on each other version and with runner V2, and
  does not compare the table.

If versions or a runner are given, only their rows are updated.

    .venv/vllm/bin/python -m tests.vllm.versions.matrix [--check | --starts] [--jobs 2] [--runner V2]
    [0.28.0 ...]
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
from tests.vllm.stock import install

SUITE = "tests/vllm/versions"
MORE = (
    "tests/vllm/adapter/test_translations.py",
    "tests/vllm/adapter/test_drafts.py",
    "tests/vllm/test_layout_on_engine.py",
    "tests/vllm/adapter/test_stats_and_events.py",
)
"""Further tests of memory, keys, drafts, metrics and events, for each version on which the connector starts."""

WITH_V2 = ("0.30.0", "0.32.0", "0.33.0")
"""The versions that are also tested with model runner V2. vLLM chooses V2 if it finds Triton."""

V2_RUNNER = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # without a driver, vLLM only accepts Triton if no device is visible
}
PART_OF_V2 = ("0.32.0", "bucket or test_drafts and eagle or qwen3 and (runners or reloaded or preempted)")
"""What --check runs with V2: a version, and an expression that selects tests."""

ONE_START = (f"{SUITE}/test_each_version.py", f"{SUITE}/test_secondary_tier.py", "-k", "qwen3 and test_scene")
"""What --starts runs on each other version: every scene, on one engine with the connector and one with the tier."""

ONE_START_OF_V2 = (f"{SUITE}/test_each_version.py", "-k", "qwen3 and test_scene and reloaded")

TOO_OLD = ("0.27.1",)
"""The versions on which the connector must refuse to start, and name the versions that work."""

REFUSED = "refused at start"
SCENES = {
    "reload": "reloaded",
    "preemption": "preempted",
    "abort": "aborted",
    "reset": "reset",
    "failed load": "failed",
}


def _tests_of(model: str, *scenes: str) -> tuple[str, ...]:
    """Return patterns for a model's tests of these scenes. Failed loads have no control: they leave no wrong bytes."""
    controls = [rf"test_control\[{model}-{scene}\]" for scene in scenes if scene != "failed"]
    return (*(rf"test_scene\[{model}-{scene}\]" for scene in scenes), *controls)


COLUMNS: Mapping[str, tuple[str, ...]] = {
    **{title: _tests_of("qwen3", scene) for title, scene in SCENES.items()},
    "all these, hybrid model": _tests_of("gemma3", *SCENES.values()),
    "all these, recurrent layers (LFM2)": (
        *_tests_of("lfm2", *SCENES.values()),
        r"test_states_of_a_shared_prefix\[lfm2\]",
    ),
    "disk, found after a restart": ("test_put_blocks_are_found_after_a_restart",),
    "store, found by another engine": (
        r"test_one_engine_finds_blocks_that_another_has_written\[mooncake\]",
        r"test_one_engine_finds_blocks_that_another_has_written\[bucket\]",
    ),
    "draft model": (r"test_drafts\[draft_model\]",),
    "EAGLE head": (r"test_drafts\[eagle\]",),
    "n-grams": (r"test_drafts\[ngram\]",),
    "layouts, metrics, events": ("tests/vllm/(adapter|test_layout_on_engine).*",),
}
"""Each column's title, and patterns for the tests it covers. Each pattern must match a test."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One row of the table: a version of vLLM with one of its model runners."""

    version: str
    runner: str = "V1"

    @property
    def label(self) -> str:
        return self.version if self.runner == "V1" else f"{self.version}, runner {self.runner}"

    @property
    def is_covered(self) -> bool:
        """Whether --check and --starts skip this setup, apart from the selected tests of V2."""
        return self.runner == "V2" or self.version == installed()

    @property
    def tests(self) -> tuple[str, ...]:
        return (SUITE,) if self.version in TOO_OLD else (SUITE, *MORE)

    @property
    def environment(self) -> dict[str, str]:
        overlay = None if self.version == installed() else str(install.OVERLAYS / self.version)
        triton, settings = (str(install.TRITON), V2_RUNNER) if self.runner == "V2" else (None, {})
        path = os.pathsep.join(filter(None, [overlay, os.environ.get("PYTHONPATH"), triton]))
        return {**os.environ, **settings, "PYTHONPATH": path, "KVOFFLOAD_VLLM": self.version}


@dataclass(frozen=True, slots=True)
class Ran:
    setup: Setup
    passed: bool  # whether no test failed and at least one ran
    results: Mapping[str, str]  # for each test, "passed", "failed", or why the test was skipped
    output: str

    def cells(self) -> list[str]:
        return [self.setup.label, *(self._cell(patterns) for patterns in COLUMNS.values())]

    def _cell(self, patterns: Sequence[str]) -> str:
        said = {self._said(pattern) for pattern in patterns}
        if len(said) == 1:
            return said.pop()
        return "failed" if "failed" in said else "not run"

    def _said(self, pattern: str) -> str:
        """Return the result of the tests that match a pattern. A version may skip some of them."""
        met = {result for test, result in self.results.items() if re.fullmatch(pattern, test)}
        if "failed" in met or met == {REFUSED}:
            return "failed" if "failed" in met else REFUSED
        return "passed" if "passed" in met else "not run"


def versions() -> list[str]:
    return sorted([installed(), *install.overlay_versions()], key=lambda one: [*map(int, one.split("."))])


def setups() -> list[Setup]:
    return [*map(Setup, versions()), *(Setup(version, "V2") for version in WITH_V2)]


def installed() -> str:
    """Return the version that is installed completely. All other tests run on this version."""
    (found,) = (pin.removeprefix("vllm==") for pin in install.pins() if pin.startswith("vllm=="))
    return found


def run(setup: Setup, tests: Sequence[str]) -> Ran:
    with tempfile.TemporaryDirectory(prefix="kvoffload-versions-") as scratch:
        result = Path(scratch) / "results.xml"
        options = ["-m", "vllm", "-q", f"--junit-xml={result}", f"--basetemp={scratch}/tests"]
        options += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env=setup.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results = read_results(result.read_text()) if result.exists() else {}
    return Ran(setup, done.returncode == 0, results, done.stdout)


def read_results(junit: str) -> dict[str, str]:
    """Return each test's result by name. The name of a test outside this folder begins with its file."""
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
    """Return a table with a column for each row, because a page has more room for scenes below each other."""
    title, *lines = zip(["vLLM", *COLUMNS], *rows, strict=True)
    lines = [title, ("---",) * len(title), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page: str, rows: Sequence[Sequence[str]]) -> str:
    text: str = load_script("readme").filled(page, "versions", render(rows))
    return text


def written_rows(page: str) -> dict[str, list[str]]:
    """Return the results that are in the page's table, by label; under "vLLM" the scenes' names."""
    (table,) = re.findall(r"<!-- versions -->\n(.*?)<!-- /versions -->", page, flags=re.DOTALL)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: [*row] for row in zip(lines[0], *lines[2:], strict=True)}


def main() -> int:
    asked = _arguments()
    of_versions = [one for one in setups() if not asked.versions or one.version in asked.versions]
    chosen = [one for one in of_versions if asked.runner in (None, one.runner)]
    if asked.starts:
        return 0 if all(one.passed for one in _run_all(_starts(chosen), asked.jobs)) else 1
    whole = [setup for setup in chosen if not (asked.check and setup.is_covered)]
    work = [(setup, setup.tests) for setup in whole]
    if asked.check and any(setup.runner == "V2" for setup in chosen):
        version, tests = PART_OF_V2
        work.append((Setup(version, "V2"), (SUITE, "-k", tests)))
    ran = _run_all(work, asked.jobs)
    rows = [one.cells() for one in ran[: len(whole)]]
    sys.stdout.write(f"\n{render(rows)}\n")
    return 0 if all(one.passed for one in ran) and _settle(rows, check=asked.check) else 1


def _starts(chosen: Sequence[Setup]) -> Sequence[tuple[Setup, Sequence[str]]]:
    others = [setup for setup in chosen if not setup.is_covered and setup.version not in TOO_OLD]
    v2 = [setup for setup in chosen if setup == Setup(installed(), "V2")]
    return [(setup, ONE_START_OF_V2) for setup in v2] + [(setup, ONE_START) for setup in others]


def _run_all(work: Sequence[tuple[Setup, Sequence[str]]], jobs: int) -> list[Ran]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(_run_and_report, *zip(*work, strict=True)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="run the smaller suite on several versions of vLLM")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--check", action="store_true", help="write nothing; fail if the table is outdated")
    instead.add_argument("--starts", action="store_true", help="only start each other version once")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="setups at a time")
    parser.add_argument("--runner", choices=("V1", "V2"), help="vLLM's model runner; by default both")
    parser.add_argument("versions", nargs="*", help="by default all that the lock names")
    return parser.parse_args()


def _run_and_report(setup: Setup, tests: Sequence[str]) -> Ran:
    began = time.monotonic()
    ran = run(setup, tests)
    # Threads of vLLM that are still running may print after pytest's last line.
    summary = [line for line in ran.output.splitlines() if re.match(r"\d+ (passed|skipped)", line)]
    words = summary[-1] if ran.passed and summary else ran.output
    sys.stdout.write(f"vLLM {setup.label}: {words} ({time.monotonic() - began:.0f} s in all)\n")
    sys.stdout.flush()
    return ran


def _settle(rows: Sequence[list[str]], *, check: bool) -> bool:
    """Write these rows to the table. With `check`, only return whether the table has them."""
    page = ROOT / "plugins" / "kvoffload_vllm" / "README.md"
    text = page.read_text(encoding="utf-8")
    known = {**written_rows(text), **{row[0]: row for row in rows}}
    wanted = filled(text, [known[setup.label] for setup in setups() if setup.label in known])
    if check and wanted != text:
        sys.stdout.write(
            f"the table of versions in {page.relative_to(ROOT)} is out of date: make vllm-versions\n"
        )
        return False
    if wanted != text:
        page.write_text(wanted, encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main())
