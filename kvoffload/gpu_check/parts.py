"""The parts of `gpu-check`, what they are given, and the lines that they find.

Each part runs in a process of its own, with a time limit: it may hang or crash, and loses only its own rest.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import TYPE_CHECKING

from kvoffload.model.errors import KVOffloadError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

_LOG_BYTES = 300  # shown of what a part has printed before it failed
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PROCESSES = get_context("spawn")  # a forked process has no use of CUDA


@dataclass(frozen=True, slots=True)
class Options:
    """What each part is given.

    Args:
        device: the GPU, as torch names it.
        mib: MiB of one large copy, and half of the memory on each side.
        repeats: of each measurement.
        host_gib: host memory of an engine.
    """

    device: str
    mib: int
    repeats: int
    host_gib: int

    @property
    def size(self) -> int:
        """Bytes of one large copy."""
        return self.mib << 20


@dataclass(frozen=True, slots=True)
class Part:
    """What runs in one process.

    Args:
        what: its subject, for the line that says how it failed.
        where: MODULE:FUNCTION.
        limit_s: after which it is killed.
        arguments: of the function, behind the options.
        is_check: whether nothing should be offloaded if it fails.
    """

    what: str
    where: str
    limit_s: float
    arguments: tuple[object, ...] = ()
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """The answer to one question.

    Args:
        what: the question.
        median: of the samples; None if the answer is in words.
        low: the least sample.
        high: the greatest sample.
        unit: of all three.
        words: facts, or the reason why nothing was measured or a part failed.
        target: the goal in words; empty without one.
        is_met: whether the goal is met; None without one.
        is_check: whether a missed goal means that nothing should be offloaded on this machine.
        is_last: whether it ends the whole check.
    """

    what: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    words: str = ""
    target: str = ""
    is_met: bool | None = None
    is_check: bool = False
    is_last: bool = False

    @property
    def verdict(self) -> str:
        """Whether the target is met, in one word; empty without a target."""
        if self.is_met is None:
            return ""
        return "pass" if self.is_met else "fail" if self.is_check else "miss"

    @property
    def text(self) -> str:
        """The line for a terminal."""
        found = self.words
        if self.median is not None:
            found = f"{_digits(self.median)}{self.unit}"
            if self.low != self.high:
                found += f" [{_digits(self.low or 0)}, {_digits(self.high or 0)}]"
        target = f" ({self.target})" if self.target else ""
        return f"{self.verdict:<4}  {self.what}: {found}{target}"


def measured(
    what: str,
    samples: Sequence[float],
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    is_check: bool = False,
) -> Line:
    """Return the line of at least one sample; the median is held against the target."""
    median = statistics.median(samples)
    target, is_met = "", None
    if at_least is not None:
        target, is_met = f"at least {at_least:g}{unit}", median >= at_least
    if at_most is not None:
        target, is_met = f"at most {at_most:g}{unit}", median <= at_most
    return Line(what, median, min(samples), max(samples), unit, "", target, is_met, is_check)


def in_words(what: str, words: str, wanted: str) -> Line:
    """Return the line of an answer in words, which is met if it equals `wanted`."""
    return Line(what, words=words, target=wanted, is_met=words == wanted)


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return each of the first samples divided by the second of its pair."""
    return [one / other for one, other in zip(mine, others, strict=True)]


class NotHere(KVOffloadError):
    """Raised when a question cannot be asked on this machine; the message has the reason."""


def asked(what: str, answers: Iterator[Line], *, is_check: bool = False) -> Iterator[Line]:
    """Yield the answers to a question; an exception is its last answer, and ends nothing else.

    Args:
        what: the question.
        answers: a generator of the lines.
        is_check: whether nothing should be offloaded on this machine if it raises.
    """
    try:
        yield from answers
    except NotHere as reason:
        yield Line(what, words=f"not asked: {reason}")
    except Exception as error:
        kind = "" if isinstance(error, KVOffloadError) else f"{type(error).__name__}: "
        words = " | ".join(f"{kind}{error}".splitlines())
        yield Line(what, words=words, is_met=False, is_check=is_check)


def lines_of(part: Part, options: Options, log: Path) -> Iterator[Line]:
    """Run a part and yield its lines as it finds them, then one that says how it failed, if it did.

    Args:
        part: which.
        options: for it.
        log: what it prints is appended here.
    """
    began = log.stat().st_size if log.exists() else 0
    deadline = time.monotonic() + part.limit_s
    found, finds = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_run, args=(part, options, log, finds))
    process.start()
    assert process.ident is not None
    finds.close()
    try:
        with suppress(EOFError):
            while found.poll(max(deadline - time.monotonic(), 0)):
                yield found.recv()
        process.join(max(deadline - time.monotonic(), 0))
        if problem := _problem(process.exitcode, part.limit_s, log, began):
            yield Line(part.what, words=problem, is_met=False, is_check=part.is_check)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.ident, signal.SIGKILL)  # also what it has started
        process.kill()
        process.join()


def _problem(code: int | None, limit_s: float, log: Path, began: int) -> str:
    """Return how a part failed, with the end of what it printed; nothing if it did not."""
    if code == 0:
        return ""
    if code is None:
        how = f"has not ended after {limit_s:g} s, and was killed"
    elif code < 0:
        how = f"ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with {code}"
    said = log.read_bytes()[began:].decode(errors="replace").strip()[-_LOG_BYTES:]
    return f"{how}: {' | '.join(said.splitlines())}" if said else how


def _run(part: Part, options: Options, log: Path, finds: Connection) -> None:
    """Run a part in this process."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with log.open("ab") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
        os.dup2(printed.fileno(), sys.stderr.fileno())
    for line in asked(part.what, _answers(part, options), is_check=part.is_check):
        finds.send(line)


def _answers(part: Part, options: Options) -> Iterator[Line]:
    module, _, name = part.where.partition(":")
    yield from getattr(import_module(module), name)(options, *part.arguments)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:#.3g}"
