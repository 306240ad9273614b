"""Names processes, and says whether they have ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_DEAD = ("Z", "X")
_STATE, _STARTED = 0, 19  # positions behind the name in /proc/PID/stat


class Process(NamedTuple):
    """A process.

    Args:
        pid: its number in its namespace.
        started: when it started, in clock ticks since the machine started. Numbers are used again, but not at once.
        namespace: the namespace of process numbers, which differs between containers.
    """

    pid: int
    started: int
    namespace: str


def this_process() -> Process:
    started = int(_fields(_PROC / "self" / "stat")[_STARTED])
    return Process(os.getpid(), started, _namespace())


def may_run(process: Process) -> bool | None:
    """Return whether a process may still run or its memory may still be written; None if that cannot be known from here.

    A process has ended when none of its threads lives. Its device may write until then, longer than its locks are held.
    """
    if process.namespace != _namespace():
        return None
    folder = _PROC / str(process.pid)
    try:
        if int(_fields(folder / "stat")[_STARTED]) != process.started:
            return False
        return any(_fields(task / "stat")[_STATE] not in _DEAD for task in (folder / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False


def _namespace() -> str:
    return os.readlink(_PROC / "self" / "ns" / "pid")


def _fields(path: Path) -> list[str]:
    return path.read_text().rpartition(") ")[2].split()
