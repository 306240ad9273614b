"""The errors that this package raises."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.model.causes import RemoteFault


class KVOffloadError(Exception):
    """Base of all errors that this package raises."""


class ConfigError(KVOffloadError):
    """Raised when settings cannot be used; the operator must change them.

    Args:
        problems: one sentence for each problem.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class EngineContractError(KVOffloadError):
    """Raised when an engine provides less than offloading needs; the adapter's author must extend the adapter."""


class IllegalTransition(KVOffloadError):
    """Raised when a state machine gets an event that is illegal in its current state: a bug in this package.

    Args:
        machine: the machine's name.
        state: the current state, which stays.
        event: the illegal event.
    """

    def __init__(self, machine: str, state: object, event: object) -> None:
        super().__init__(f"{machine} in state {state!r} does not take {event!r}")


class HostMemoryError(KVOffloadError):
    """Raised when host memory cannot be allocated; the operator must lower `host_bytes` or free memory."""


class HostMemoryBusy(HostMemoryError):
    """Raised when host memory cannot be allocated or pinned now. A later attempt may succeed."""


class CopyError(KVOffloadError):
    """Raised when a copy fails. The job then fails, and the engine recomputes the tokens of a failed load."""


class DeviceLost(CopyError):
    """Raised when the device executes nothing more for this process. No copy is running any more."""


class DiskError(KVOffloadError):
    """Raised when the disk tier's files cannot be used. The engine continues without the disk until a restart."""


class RemoteError(KVOffloadError):
    """Raised when the remote tier fails or cannot be reached. `fault` is the metrics label of the failure."""

    def __init__(self, message: str, fault: RemoteFault = RemoteFault.OTHER) -> None:
        self.fault = fault
        super().__init__(message)


class RemoteGone(RemoteError):
    """Raised when the connection to the remote tier has ended, so that the next call must connect again."""


def printable(text: str) -> str:
    """Replace the characters that a terminal might interpret, such as control characters, with "?".

    The names of files, models and servers may contain such characters.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def reason_of(error: Exception) -> str:
    """Return an error's text, with the name of its class unless it is an `OSError` or a `KVOffloadError`."""
    return str(error) if isinstance(error, (OSError, KVOffloadError)) else f"{type(error).__name__}: {error}"
