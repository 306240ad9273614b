"""Breaks copies of the sources and runs the tests on them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
_SOURCES = ("kvoffload", "plugins", "tests", "dashboards", "pyproject.toml", "README.md", "Makefile")
_LIMIT_S = 1800  # a test has a limit of its own; this one is for what hangs between tests, or behind the last
_FINE = 0
_NONE_CHOSEN = 5
_NOTICED = (1, 2)  # a test failed, or the tests cannot even be read
_CRASHED = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)  # a copy ran into memory that was given back
_SAID = re.compile(r"(?:FAILED|ERROR) (tests/.+?)(?: - .*)?")


@contextmanager
def snapshot(sources: Path = ROOT) -> Iterator[Path]:
    """Lend a copy of the sources. A hunt breaks copies of one, so that it may take long while the sources change."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-mutant-") as folder:
        for name in _SOURCES:
            source, target = sources / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        yield Path(folder)


def killer(mutant: Mutant, sources: Path = ROOT) -> str | None:
    """Return the first test that notices the mutant, None for a survivor."""
    with snapshot(sources) as root:
        mutant.apply(root)
        # The tests of its own rule are few and the likeliest to notice.
        first = first_failure(root, mutant.tests, "-k", f"test_r{mutant.rule}_")
        return first or next(filter(None, (first_failure(root, [tests]) for tests in mutant.tests)), None)


def first_failure(root: Path, tests: Sequence[str], *options: str) -> str | None:
    """Run tests of a copy of the sources; return the first that fails, None where all pass."""
    path = os.pathsep.join((str(root), str(root / "plugins")))
    # No bytecode: a line that changes within a second, and not in length, would be taken for the old one.
    environment = os.environ | {
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "fast",
    }
    marks = "not slow and not gpu and not vllm"
    # One seed: an example that a property test happens to find in one run of many is not what notices a mutant.
    drawing = "--hypothesis-seed=0"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", drawing, "-m", marks]
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{', '.join(tests)}: no end within {_LIMIT_S} s"
    if done.returncode in (*_NOTICED, *_CRASHED):
        return _named(done.stdout) or f"{', '.join(tests)}: pytest ended with {done.returncode}"
    if done.returncode == _FINE or (done.returncode == _NONE_CHOSEN and options):
        return None
    raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _named(output: str) -> str | None:
    """Return the test that pytest's summary says has failed."""
    said = filter(None, map(_SAID.fullmatch, output.splitlines()))
    return next((match[1] for match in said), None)
