"""Formats the results of mutants as a table and as a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec


class Result(msgspec.Struct, omit_defaults=True):
    """The result for one mutant.

    Args:
        key, digest: the mutant's key and digest.
        line: the mutant's line.
        outcome: "not run" if no test runs the line; the other values are those of `Verdict`.
        by: the tests that noticed the mutant; only the first test unless all tests were run.
        tests: how many tests run the line.
        seconds: how long these tests took.
    """

    key: str
    digest: str
    line: int
    outcome: str
    by: list[str] = []
    tests: int = 0
    seconds: float = 0

    @property
    def place(self) -> str:
        return f"{self.key.split(' ', 1)[0]}:{self.line}"

    @property
    def change(self) -> str:
        return self.key.split(" ", 1)[1]


def summary(results: Sequence[Result], tests: Iterable[str], has_all: bool) -> Iterator[str]:
    """Yield lines of text: how many mutants of each package had which outcome.

    If all tests were run, also yield how many tests notice mutants that no other test notices.
    """
    packages = Counter((str(Path(result.place).parent), result.outcome) for result in results)
    for (package, outcome), number in sorted(packages.items()):
        yield f"{package}  {outcome}  {number}"
    yield f"{len(results)} mutants, {sum(result.seconds for result in results):.0f} s"
    if has_all:
        alone = {result.by[0] for result in results if len(result.by) == 1}
        noticing = {test for result in results for test in result.by}
        yield f"{len(alone)} tests notice a mutant that no other test notices"
        yield f"{len(noticing - alone)} tests notice only what other tests notice too"
        yield f"{len(set(tests) - noticing)} tests notice nothing"


def written(results: Sequence[Result], title: str) -> str:
    """Return a table with one line per mutant, and a numbered list of the tests that noticed a mutant."""
    tests = sorted({test for result in results for test in result.by})
    number = {test: index for index, test in enumerate(tests)}
    outcomes = Counter(result.outcome for result in results)
    lines = [f"# {title}: {len(results)} mutants"]
    lines += [f"# {outcome}: {count}" for outcome, count in sorted(outcomes.items())]
    for result in sorted(results, key=lambda result: (result.key.split(" ", 1)[0], result.line, result.key)):
        noticed = _ranges(sorted(number[test] for test in result.by))
        lines.append(f"{result.place}\t{result.change}\t{result.outcome}\t{noticed}\t{result.digest}")
    lines += [f"{index}\t{test}" for index, test in enumerate(tests)]
    return "\n".join(lines) + "\n"


def read(text: str) -> Iterator[Result]:
    rows = [line.split("\t") for line in text.splitlines()]
    tests = [row[1] for row in rows if len(row) == 2]
    for place, change, outcome, noticed, digest in (row for row in rows if len(row) == 5):
        path, line = place.rsplit(":", 1)
        ends = ([*map(int, part.split("-"))] for part in noticed.split())
        by = [tests[number] for end in ends for number in range(end[0], end[-1] + 1)]
        yield Result(f"{path} {change}", digest, int(line), outcome, by)


def _ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text; consecutive numbers become "first-last"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return " ".join("-".join(map(str, ends)) for ends in found)
