"""Runs modules of these tests in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 240.0


def python_path() -> str:
    """Return the PYTHONPATH with which another process can import these tests."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]))


def run_module(
    name: str,
    *arguments: object,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
) -> str:
    """Run a module of these tests in another process; return what it printed.

    Args:
        name: the module.
        arguments: the program's arguments.
        launcher: the arguments of a Python program that starts the module.
        environment: additional environment variables. None removes a variable.
    """
    variables = {**os.environ, "PYTHONPATH": python_path(), **(environment or {})}
    done = subprocess.run(
        [sys.executable, *launcher, "-m", name, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE_S,
        env={name: value for name, value in variables.items() if value is not None},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
