"""Every command in the documents' fenced blocks runs as written, or the block's first line names what the
command needs.
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

NEEDS = {"a GPU", "a cluster", "a package index", "Docker", "SGLang", "vLLM"}
# README's blocks install what they run, so tests/install/test_bare.py runs them in a separate environment.
RUN = [page for page in PAGES if page != ROOT / "README.md" and any(not one.needs for one in blocks(page))]

DEMOS = {"disk.md", "store.md"}
"""Pages with demos of a restart and of a store. tests/cli runs smaller demos instead."""


def environment() -> dict[str, str]:
    """Return an environment with this interpreter's commands first on the path, and without settings of vLLM
    or a terminal.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "COLUMNS": "100"}


def shell(text: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", text]


@contextmanager
def serving(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a block that runs until Ctrl-C, wait until it serves, and end it by Ctrl-C.

    `exec` replaces the shell by the command, so that the command gets the signal.
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
    """All blocks of a page run in one folder. A block that runs until Ctrl-C keeps running during the next block."""
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
def test_the_example_of_a_plugin_runs(tmp_path: Path) -> None:
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
def test_what_a_block_needs_has_a_known_name(page: Path) -> None:
    assert {one.needs for one in blocks(page)} - {""} <= NEEDS


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=lambda page: page.stem
)
def test_a_page_hides_no_command_from_this_test(page: Path) -> None:
    """This test would not run commands in indented code or in other fences."""
    text = re.sub(r"^```bash\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert (
        re.findall(
            r"^(?: {4}|\$ )(?:kvoffload|pip|make|docker|kubectl|helm|vllm) .*", text, flags=re.MULTILINE
        )
        == []
    )


def test_there_are_commands_to_run() -> None:
    assert {"check.md", "watch.md"} <= {page.name for page in RUN}
