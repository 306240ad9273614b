"""What `gpu-check` finds: a line for each question, printed and written to a file as soon as it is known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvoffload.cli.exits import Exit
from kvoffload.cli.partial_file import written
from kvoffload.model.errors import KVOffloadError


@dataclass(frozen=True, slots=True)
class Line:
    """The answer to one question.

    Args:
        what: the question.
        median: of the samples; None where the answer is in words.
        low: the least sample.
        high: the greatest sample.
        unit: of all three.
        words: facts, or why something was not measured or has failed.
        target: what was wanted, in words; empty where nothing was.
        is_met: whether it is so; None without a target.
        is_check: whether nothing should be offloaded on this machine where it is not so.
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


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the one over the other, in pairs."""
    return [one / other for one, other in zip(mine, others, strict=True)]


class NotHere(KVOffloadError):
    """Raised when a question cannot be asked on this machine; the message says why."""


def ask_each(
    questions: Mapping[str, Callable[[], Iterator[Line]]], *, is_check: bool = False
) -> Iterator[Line]:
    """Yield the answers to each question; an exception is the answer to its question only."""
    for what, ask in questions.items():
        try:
            yield from ask()
        except NotHere as reason:
            yield Line(what, words=f"not asked: {reason}")
        except Exception as error:
            kind = "" if isinstance(error, KVOffloadError) else f"{type(error).__name__}: "
            words = " | ".join(f"{kind}{error}".splitlines())
            yield Line(what, words=words, is_met=False, is_check=is_check)


class Results:
    """All lines so far, on standard output and in a file that is replaced with each line.

    Args:
        target: the file.
        about: what else the file says: machine, options, time.
        as_json: whether each line is printed as a JSON object.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, target: Path, about: Mapping[str, object], *, as_json: bool) -> None:
        self._target = target
        self._about = about
        self._as_json = as_json
        self.lines: list[Line] = []
        self._write()

    def add(self, line: Line) -> None:
        """Write the file, and print the line.

        Raises:
            OutputError: the file cannot be written.
        """
        self.lines.append(line)
        self._write()  # first: what was printed is on the disk
        print(json.dumps(_plain(line)) if self._as_json else line.text, flush=True)

    def exit_code(self) -> Exit:
        """The exit code for all lines together."""
        verdicts = {line.verdict for line in self.lines}
        return Exit.FAILED if "fail" in verdicts else Exit.MISSED if "miss" in verdicts else Exit.OK

    def _write(self) -> None:
        with written(self._target) as file:
            json.dump({**self._about, "lines": [_plain(line) for line in self.lines]}, file, indent=1)


def _plain(line: Line) -> dict[str, object]:
    """Return a line's fields for JSON without the empty ones, numbers to five digits."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in asdict(line).items()
        if value not in (None, "") and value is not False
    }


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:#.3g}"
