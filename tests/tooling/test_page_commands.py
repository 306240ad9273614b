"""Runs the commands in the documents' fenced blocks. A block whose first line names a requirement, such as a
GPU, is skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tooling.pages import PAGES, blocks
from tests.tooling.scripts import ROOT

NEEDS = {"a GPU", "a cluster", "a package index", "Docker", "SGLang", "root", "vLLM"}
# The README's commands install packages, so tests/install/test_bare.py runs them in a separate environment.
RUN = [page for page in PAGES if page != ROOT / "README.md" and any(not one.needs for one in blocks(page))]
assert {"check.md", "watch.md"} <= {page.name for page in RUN}

DEMOS = {"disk.md", "host-memory.md", "store.md"}
"""The demos on these pages run only in the full suite. tests/cli runs shorter demos."""


def environment() -> dict[str, str]:
    """Return this process's environment, with the commands of this Python first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "COLUMNS": "100"}


def shell(text: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", text]


@contextmanager
def serving(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a block that runs until Ctrl-C, wait until it serves metrics, and interrupt it at the end.

    `exec` replaces the shell with the command, so that the command receives the signal.
    """
    command = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    process = subprocess.Popen(
        shell(f"exec {command}"),
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if "metrics stay at" in line:
                break
        else:
            pytest.fail(f"it ended: {''.join(said)}")
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page",
    [pytest.param(one, marks=pytest.mark.full if one.name in DEMOS else ()) for one in RUN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    here = [one for one in blocks(page) if not one.needs]
    while here:
        one = here.pop(0)
        if one.is_endless:
            with serving(one.text, tmp_path) as process:
                run(here.pop(0).text, tmp_path)
            assert process.returncode in (0, 130)
        else:
            run(one.text, tmp_path)


@pytest.mark.slow
def test_the_example_plugin_runs(tmp_path: Path) -> None:
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/plugins.md").read_text(), re.MULTILINE | re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *_, tokens = done.stdout.splitlines()
    assert first == "0 [('one', 21)]"
    assert len(json.loads(tokens)) == 3


def run(text: str, folder: Path) -> None:
    done = subprocess.run(
        shell(text), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_needs_of_every_block_are_known(page: Path) -> None:
    assert {one.needs for one in blocks(page)} - {""} <= NEEDS


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=lambda page: page.stem
)
def test_a_pages_commands_are_all_in_bash_fences(page: Path) -> None:
    text = re.sub(r"^```bash\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    commands = r"^(?: {4}|\$ )(?:kvoffload|pip|make|docker|kubectl|helm|vllm) .*"
    assert re.findall(commands, text, flags=re.MULTILINE) == []
