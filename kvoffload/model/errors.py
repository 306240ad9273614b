"""Errors, grouped by who must act."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.model.causes import RemoteFault


class KVOffloadError(Exception):
    """Base of all errors that this package raises."""


class ConfigError(KVOffloadError):
    """Raised when settings cannot be used; the operator must change them.

    Args:
        problems: one sentence for each problem; all are reported at once.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class EngineContractError(KVOffloadError):
    """Raised when an engine provides less than offloading needs; the adapter's author must act."""


class IllegalTransition(KVOffloadError):
    """Raised when a state machine gets an event that is illegal in its current state: a bug in this package.

    Args:
        machine: the machine's name.
        state: the machine's state, which is unchanged.
        event: the event.
    """

    def __init__(self, machine: str, state: object, event: object) -> None:
        super().__init__(f"{machine} in state {state!r} does not take {event!r}")


class HostMemoryError(KVOffloadError):
    """Raised when host memory cannot be allocated; the operator must lower `host_bytes` or free memory."""


class HostMemoryBusy(HostMemoryError):
    """Raised when host memory cannot be allocated or pinned now; trying again later may succeed."""


class CopyError(KVOffloadError):
    """Raised when a copy fails; the job fails and the engine recomputes."""


class DeviceLost(CopyError):
    """Raised when the device can execute nothing more for this process, so that no copy is running."""


class DiskError(KVOffloadError):
    """Raised when the disk tier's files cannot be used; the operator must act.

    The engine continues without the tier.
    """


class RemoteError(KVOffloadError):
    """Raised when the remote tier fails or cannot be reached; `fault` is the kind of failure, for metrics."""

    def __init__(self, message: str, fault: RemoteFault = RemoteFault.OTHER) -> None:
        self.fault = fault
        super().__init__(message)


class RemoteGone(RemoteError):
    """Raised when the connection to the remote tier has ended; the next call needs a new one."""


def reason_of(error: Exception) -> str:
    """Return an error's text.

    The text starts with the error's class, unless the error is an `OSError` or a `KVOffloadError`.
    """
    return str(error) if isinstance(error, (OSError, KVOffloadError)) else f"{type(error).__name__}: {error}"
