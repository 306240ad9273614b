"""The words of the doctor: what is known of a setup, a check, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffload.checks.machine import Machine
    from kvoffload.model.config import OffloadConfig


class Verdict(StrEnum):
    """What a check comes to."""

    GO = "go"
    WARNING = "warning"  # it starts, and something about it costs more or gives less than it could
    NO_GO = "no-go"  # it does not start, fails requests, or is of no use
    UNKNOWN = "not known"  # from here


FAILING = frozenset([Verdict.WARNING, Verdict.NO_GO])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is known of the engine that is to be started; None and empty for what is not.

    Args:
        config: the operator's settings; None where they cannot be used.
        ranks: workers of the engine on this machine.
        device_blocks: blocks of the device's KV cache.
        page_bytes: one rank's bytes of one block, in each tensor of the KV cache; of one tensor where no more is known.
        block_bytes: one rank's bytes of one block, in all tensors together.
        pins: whether host memory is pinned, which a CUDA device makes it.
    """

    config: OffloadConfig | None
    ranks: int | None = None
    device_blocks: int | None = None
    page_bytes: tuple[int, ...] = ()
    block_bytes: int | None = None
    pins: bool | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        verdict: what it comes to.
        text: why, in a sentence.
        remedy: what to do about it; empty where nothing is to be done.
    """

    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question.

    Args:
        name: what it is about; stable, as scripts and logs name it.
        find: answers it; may raise, which is a finding of its own.
    """

    name: str
    find: Callable[[Setup, Machine], Finding]


@dataclass(frozen=True, slots=True)
class Answer:
    """A check's finding, with the check's name."""

    check: str
    finding: Finding


def run_checks(checks: Iterable[Check], setup: Setup, machine: Machine) -> list[Answer]:
    """Answer all of them. One that raises has found nothing out, and says so; the others go on."""
    return [Answer(check.name, _find(check, setup, machine)) for check in checks]


def go(text: str) -> Finding:
    """Return that all is well."""
    return Finding(Verdict.GO, text)


def warn(text: str, remedy: str) -> Finding:
    """Return that it starts, but."""
    return Finding(Verdict.WARNING, text, remedy)


def no_go(text: str, remedy: str) -> Finding:
    """Return that it must not be started so."""
    return Finding(Verdict.NO_GO, text, remedy)


def not_known(text: str, remedy: str = "") -> Finding:
    """Return that it cannot be known from here, and how it could."""
    return Finding(Verdict.UNKNOWN, f"not known here: {text}", remedy)


def concluded(name: str, finding: Finding) -> Check:
    """Return a check whose finding is known already."""

    def find(_setup: Setup, _machine: Machine) -> Finding:
        return finding

    return Check(name, find)


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def _find(check: Check, setup: Setup, machine: Machine) -> Finding:
    try:
        return check.find(setup, machine)
    except Exception as error:  # a check that fails says nothing about the machine, and must stop nobody
        return warn(f"the check itself failed: {error!r}", "report it; the others are not affected")
