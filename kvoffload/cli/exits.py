"""How the command ends: its exit codes, and the error whose message is for whoever typed it."""

from __future__ import annotations

from enum import IntEnum

from kvoffload.model.errors import KVOffloadError


class Exit(IntEnum):
    """What a shell sees."""

    OK = 0
    FAILED = 1  # it ran, and what it found is wrong
    USAGE = 2  # it cannot run as asked
    INTERRUPTED = 130  # as shells write a process that Ctrl-C ended
    TERMINATED = 143  # as shells write a process that SIGTERM ended


class CommandError(KVOffloadError):
    """Raised when a command cannot do what was asked; whoever typed it must change something."""
