"""Errors, split by who must act."""

from __future__ import annotations

from collections.abc import Sequence


class KVOffloadError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(KVOffloadError):
    """Raised when settings cannot be used; the operator must change them.

    Args:
        problems: one sentence for each problem, all of them at once.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class EngineContractError(KVOffloadError):
    """Raised when an engine lends or promises less than offloading needs; the adapter's author must act."""


class IllegalTransition(KVOffloadError):
    """Raised when a state machine is asked for a step that its table does not hold; it is our own bug.

    Args:
        machine: which machine.
        state: the state it was in, and still is.
        event: what was asked of it.
    """

    def __init__(self, machine: str, state: object, event: object) -> None:
        super().__init__(f"{machine} in state {state!r} does not take {event!r}")


class HostMemoryError(KVOffloadError):
    """Raised when host memory cannot be had; the operator must lower `host_bytes` or free memory."""


class CopyError(KVOffloadError):
    """Raised when a copier cannot do a copy; the job fails and the engine recomputes."""
