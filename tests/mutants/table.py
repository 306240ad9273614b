"""What became of the mutants, as lines to be kept and as a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec


class Result(msgspec.Struct, omit_defaults=True):
    """What became of a mutant.

    Args:
        key, digest: of the mutant.
        line: where it is.
        outcome: "not run" where no test runs the line; the others are those of `Verdict`.
        by: the tests that noticed, only the first one unless all were asked for.
        tests: how many tests run the line.
        seconds: how long they took.
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
        """Return file and line."""
        return f"{self.key.split(' ', 1)[0]}:{self.line}"

    @property
    def change(self) -> str:
        """Return function and change."""
        return self.key.split(" ", 1)[1]


def summary(results: Sequence[Result], tests: Iterable[str], has_all: bool) -> Iterator[str]:
    """Count what became of the mutants of each package; where all killers are known, count what tests notice."""
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
    """Write a table: a line for each mutant, with the numbers of the tests that noticed; then the tests."""
    tests = sorted({test for result in results for test in result.by})
    number = {test: index for index, test in enumerate(tests)}
    outcomes = Counter(result.outcome for result in results)
    lines = [f"# {title}: {len(results)} mutants"]
    lines += [f"# {outcome}: {count}" for outcome, count in sorted(outcomes.items())]
    for result in sorted(results, key=lambda result: (result.key.split(" ", 1)[0], result.line, result.key)):
        noticed = _ranges(sorted(number[test] for test in result.by))
        lines.append(f"{result.place}\t{result.change}\t{result.outcome}\t{noticed}")
    lines += [f"{index}\t{test}" for index, test in enumerate(tests)]
    return "\n".join(lines) + "\n"


def _ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers, those in a row as "first-last"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return " ".join("-".join(map(str, ends)) for ends in found)
