"""One broken line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Few files each, and none that measures: a hunt must be short, and what fails now and then notices nothing.
CORE = ("tests/core",)
ENGINE = ("tests/engine/test_capacity.py",)
RUNTIME = ("tests/runtime/test_broken_core.py", "tests/runtime/test_scheduler_side.py")
BUS = ("tests/bus",)
DISK = (
    "tests/core/test_disk.py",
    "tests/core/test_fetches.py",
    "tests/transfer/test_disk.py",
    "tests/reference/test_disk.py",
)
REMOTE = (
    "tests/core/test_remote.py",
    "tests/transfer/test_blocking_calls.py",
    "tests/transfer/test_remote.py",
    "tests/remote/test_catalog.py",
)
CUDA = ("tests/transfer/test_cuda_life.py", "tests/transfer/test_cuda_driver.py")
TRANSFER = ("tests/transfer/test_pump.py", "tests/transfer/test_pump_cancellation.py")


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

    def broken(self, root: Path) -> str:
        """Return the source file under `root` with the line broken.

        Raises:
            ValueError: the line is not there exactly once.
        """
        source = (root / self.path).read_text()
        if source.count(self.line) != 1:
            raise ValueError(f"{self} is there {source.count(self.line)} times")
        return source.replace(self.line, self.instead)

    def apply(self, root: Path) -> None:
        """Break the line in the sources under `root`."""
        (root / self.path).write_text(self.broken(root))
