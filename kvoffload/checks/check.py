"""What a check gets (`Setup`), the check itself, and its finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kvoffload.model.config import OffloadConfig


class Verdict(StrEnum):
    """The result of a check, the best first."""

    GO = "go"
    UNKNOWN = "not known"  # it cannot be found out here, or was not given
    WARNING = "warning"  # the engine starts, but something costs more or gains less than it could
    NO_GO = "no-go"  # the engine does not start, or fails requests, or offloading is of no use


FAILING = frozenset([Verdict.WARNING, Verdict.NO_GO])


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an engine; None or empty where they are not known before its start.

    Args:
        ranks: workers of the engine on this machine.
        block_bytes: one rank's bytes of one block, in all tensors together.
        page_bytes: one rank's bytes of one block, in each tensor of the KV cache.
        device_blocks: blocks of the device's KV cache.
    """

    ranks: int = 1
    block_bytes: int | None = None
    page_bytes: tuple[int, ...] = ()
    device_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What is known of an engine before its start.

    Args:
        config: the operator's settings.
        sizes: the engine's sizes.
        pins: whether host memory is pinned, as it is for a CUDA device.
    """

    config: OffloadConfig
    sizes: Sizes = Sizes()
    pins: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        verdict: the result.
        text: the reason, in a sentence.
        remedy: what to do about it; empty if nothing.
        check: the name of the check, which `run_checks` fills in.
    """

    verdict: Verdict
    text: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question.

    Args:
        name: its subject. Scripts and logs use it, so it does not change.
        find: answers it; an exception becomes a warning.
    """

    name: str
    find: Callable[[Setup], Finding]


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says about an engine.

    Args:
        settings: kvoffload's settings in the engine's own configuration; None if there are none.
        sizes: the engine's sizes.
        checks: the adapter's checks.
    """

    settings: Mapping[str, object] | None
    sizes: Sizes
    checks: tuple[Check, ...]


def run_checks(checks: Iterable[Check], setup: Setup) -> list[Finding]:
    """Return the finding of each check, also after one that raises."""
    return [replace(_find(check, setup), check=check.name) for check in checks]


def go(text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Verdict.GO, text)


def warn(text: str, remedy: str) -> Finding:
    """Return a finding of a problem that does not stop the engine."""
    return Finding(Verdict.WARNING, text, remedy)


def no_go(text: str, remedy: str) -> Finding:
    """Return a finding of a problem that must be solved before the start."""
    return Finding(Verdict.NO_GO, text, remedy)


def not_known(text: str, remedy: str = "") -> Finding:
    """Return the finding of a check that lacks input; the remedy says which."""
    return Finding(Verdict.UNKNOWN, text, remedy)


def _find(check: Check, setup: Setup) -> Finding:
    try:
        return check.find(setup)
    except Exception as error:  # an error in a check must not stop an engine
        return warn(f"the check itself failed: {error!r}", "report it; the others are not affected")
