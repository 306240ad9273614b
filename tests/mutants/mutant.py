"""One broken line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CORE = ("tests/core", "tests/explore")
ENGINE = ("tests/engine",)
RUNTIME = ("tests/runtime", "tests/bus")
TRANSFER = ("tests/transfer",)


@dataclass(frozen=True)
class Mutant:
    """A change that some test must notice.

    Args:
        rule: which rule it breaks.
        path: the source file.
        line: what is there, found exactly once; surrounding white space does not count, line breaks in it do.
        instead: what is put there.
        tests: where the test that notices is looked for, in this order.
    """

    rule: int
    path: str
    line: str
    instead: str = "pass"
    tests: tuple[str, ...] = CORE

    def __str__(self) -> str:
        return f"R{self.rule} {self.path}: {self.line.splitlines()[0].strip()!r} -> {self.instead.strip()!r}"

    def apply(self, root: Path) -> None:
        """Break the line in the sources under `root`.

        Raises:
            ValueError: the line is not there exactly once.
        """
        file = root / self.path
        source = file.read_text()
        if source.count(self.line) != 1:
            raise ValueError(f"{self} is there {source.count(self.line)} times")
        file.write_text(source.replace(self.line, self.instead))
