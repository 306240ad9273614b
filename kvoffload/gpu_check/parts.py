"""The parts of `gpu-check`, their options, and the lines that they yield.

Each part runs in a separate process with a time limit. If a part hangs or crashes, only its remaining checks are lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
import time
import traceback
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

_LOG_BYTES = 300  # how many bytes of a failed part's output are quoted in its line
_DIE_WITH_PARENT = 1  # the kernel's constant PR_SET_PDEATHSIG
_PROCESSES = get_context("spawn")  # spawned, because CUDA does not work in a forked process


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options. Every part gets them.

    Args:
        device: the GPU, as torch names it.
        size: the size of one large copy in bytes, a multiple of 1 MiB. Twice as much is allocated on host and device.
        repeats: how often each measurement is repeated.
        host_bytes: the size of the host memory that an engine offloads to, in bytes.
    """

    device: str
    size: int
    repeats: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class CheckPart:
    """A part of the check, which runs in a separate process.

    Args:
        what: what the part checks. If the part fails, its line begins with this text.
        where: the function that yields the part's lines, as MODULE:FUNCTION.
        limit_s: the time limit in seconds, after which the process is killed.
        arguments: the arguments that the function gets after the options.
        is_check: whether a failure of this part means that nothing should be offloaded on this machine.
    """

    what: str
    where: str
    limit_s: float
    arguments: tuple[object, ...] = ()
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the result: the answer to one question.

    Args:
        what: the question.
        median: the median of the samples; None if the answer is in words.
        low: the smallest sample.
        high: the largest sample.
        unit: the unit of `median`, `low` and `high`.
        words: facts, or the reason why nothing was measured or a part failed.
        target: the goal in words; empty if there is no goal.
        is_met: whether the goal is met; None if there is no goal.
        is_check: whether a missed goal means that nothing should be offloaded on this machine.
        is_last: whether the whole check ends with this line.
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
        """The line's verdict: "pass", "fail" or "miss"; empty if the line has no goal."""
        if self.is_met is None:
            return ""
        return "pass" if self.is_met else "fail" if self.is_check else "miss"

    @property
    def text(self) -> str:
        """The text that the terminal shows for this line."""
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
    """Return a line with the median of one or more samples. If there is a goal, compare the median with it."""
    median = statistics.median(samples)
    target, is_met = "", None
    if at_least is not None:
        target, is_met = f"at least {at_least:g}{unit}", median >= at_least
    if at_most is not None:
        target, is_met = f"at most {at_most:g}{unit}", median <= at_most
    return Line(what, median, min(samples), max(samples), unit, "", target, is_met, is_check)


def in_words(what: str, words: str, wanted: str) -> Line:
    """Return a line with an answer in words. Its goal is met if `words` equals `wanted`."""
    return Line(what, words=words, target=wanted, is_met=words == wanted)


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each sample in `mine` to the sample at the same index in `others`."""
    return [one / other for one, other in zip(mine, others, strict=True)]


class NotHere(KVOffloadError):
    """Raised when a check cannot be made on this machine. The message has the reason."""


def asked(what: str, answers: Iterator[Line], *, is_check: bool = False) -> Iterator[Line]:
    """Yield the lines of `answers`. If `answers` raises an exception, the last line reports the exception.

    An unexpected exception's traceback goes to standard error, which a part's process writes to the log.

    Args:
        what: the question.
        answers: a generator of the lines.
        is_check: whether an exception means that nothing should be offloaded on this machine.
    """
    try:
        yield from answers
    except NotHere as reason:
        yield Line(what, words=f"not asked: {reason}")
    except Exception as error:
        kind = ""
        if not isinstance(error, KVOffloadError):
            kind = f"{type(error).__name__}: "
            traceback.print_exc()
        words = " | ".join(f"{kind}{error}".splitlines())
        yield Line(what, words=words, is_met=False, is_check=is_check)


def lines_of(part: CheckPart, options: Options, log: Path) -> Iterator[Line]:
    """Run a part, and yield each of its lines when it arrives. If the part fails, the last line says how.

    Args:
        part: the part to run.
        options: the options of the command.
        log: the file to which the part's output is appended.
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
            os.killpg(process.ident, signal.SIGKILL)  # also kills the processes that the part has started
        process.kill()
        process.join()


def _problem(code: int | None, limit_s: float, log: Path, began: int) -> str:
    """Return how a part failed, with the end of its output. The text is empty if the part succeeded."""
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


def _run(part: CheckPart, options: Options, log: Path, finds: Connection) -> None:
    """Run a part. This is the main function of the part's process."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with log.open("ab") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
        os.dup2(printed.fileno(), sys.stderr.fileno())
    for line in asked(part.what, _answers(part, options), is_check=part.is_check):
        finds.send(line)


def _answers(part: CheckPart, options: Options) -> Iterator[Line]:
    module, _, name = part.where.partition(":")
    yield from getattr(import_module(module), name)(options, *part.arguments)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:#.3g}"
