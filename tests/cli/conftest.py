from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from tests.one_thread import one_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["one_thread"]

# Three turns of four conversations. The device's cache holds about a third of their blocks.
SMALL = (
    "demo --model tiny --conversations 4 --turns 3 --first-tokens 100 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks {blocks} --host-bytes 16MiB"
)

# The demo runs long enough for host memory to become ready, even on a busy machine, and the host must evict.
JOURNALED = (
    "demo --model tiny --conversations 6 --turns 4 --first-tokens 400 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks 80 --host-bytes 4MiB"
)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the command with wrong usage; return the only line that it prints."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (Exit.USAGE, "", 1)
    assert err.startswith("kvoffload: error: ")
    return err


@pytest.fixture(scope="session")
def demo_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a demo that evicts blocks from the host; return its journal."""
    journal = tmp_path_factory.mktemp("run") / "journal.jsonl"
    # Run in a separate process: the demo sets up logging, which would otherwise affect the whole session.
    command = [sys.executable, "-m", "kvoffload", *JOURNALED.split(), "--config", f"journal_path={journal}"]
    subprocess.run(command, check=True, capture_output=True)
    return journal


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    logger = logging.getLogger("kvoffload")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def small() -> list[str]:
    """Return the arguments of a small demo with full attention."""
    return SMALL.format(blocks=26).split()
