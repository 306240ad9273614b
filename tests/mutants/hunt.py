"""Breaks a copy of the sources and runs the tests on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
_SOURCES = ("kvoffload", "plugins", "tests", "dashboards", "pyproject.toml", "README.md", "Makefile")


def is_killed(mutant: Mutant) -> bool:
    """Whether a test notices the mutant."""
    with _copy() as root:
        mutant.apply(root)
        return any(not passes(root, [tests]) for tests in mutant.tests)


def survive_unbroken(tests: Sequence[str]) -> bool:
    """Whether these tests pass on a copy in which nothing is broken: else every mutant would seem to be killed."""
    with _copy() as root:
        return passes(root, tests)


def passes(root: Path, tests: Sequence[str]) -> bool:
    """Run tests of a copy of the sources, up to the first that fails."""
    path = os.pathsep.join((str(root), str(root / "plugins")))
    # No bytecode: a line that changes within a second, and not in length, would be taken for the old one.
    environment = os.environ | {
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "fast",
    }
    marks = "not slow and not gpu and not vllm"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 2):  # 2: the tests cannot even be read, which is noticing too
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvoffload-mutant-") as folder:
        for name in _SOURCES:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        yield Path(folder)
