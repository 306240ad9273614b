"""Runs all tests once and records which lines each test runs, how long it takes, and whether it starts
processes.
"""

from __future__ import annotations

import multiprocessing.process
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coverage import Coverage

from tests.mutants.generate import Mutant

_LONG_S = 5.0
_STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system")
_AT_IMPORT = -1


class Tests(msgspec.Struct):
    """The results of running all tests once.

    Args:
        digest: a digest of all sources and tests.
        seconds: processor time of each test that is quick, passes and starts no process; the quickest
            test comes first.
        left_out: tests not used with mutants, each with the reason.
        lines: for each source file and line, the tests that run the line, as positions in `seconds`, or
            -1 for an import.
    """

    digest: str
    seconds: dict[str, float]
    left_out: dict[str, str]
    lines: dict[str, dict[int, list[int]]]

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's line, the quickest test first."""
        lines = self.lines.get(mutant.path, {})
        found = {test for line in mutant.lines for test in lines.get(line, ())}
        if found == {_AT_IMPORT}:  # Code that runs at import may affect any test of the module.
            found = {test for tests in lines.values() for test in tests}
        names = list(self.seconds)
        return [names[test] for test in sorted(found - {_AT_IMPORT}) if names[test] not in self.left_out]

    @property
    def chosen(self) -> list[str]:
        """Return the tests that are run with mutants, the quickest test first."""
        return [test for test in self.seconds if test not in self.left_out]

    def limit_s(self, tests: Iterable[str]) -> float:
        """Return a time limit for running these tests with a mutant on a busy machine."""
        return 120 + 20 * sum(self.seconds[test] for test in tests)


class Recorder:
    """A pytest plugin that tells coverage which test is running.

    Lines that a shared fixture runs count for all tests that use the fixture.
    """

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._contexts = [""]  # the empty name is for imports and collection
        self._starts = 0
        self._starting = set[str]()  # tests that start processes, and fixtures that keep processes
        self.users = defaultdict[str, set[str]](set)
        self.seconds: dict[str, float] = {}
        self.left_out: dict[str, str] = {}
        sys.addaudithook(self._audit)
        start = multiprocessing.process.BaseProcess.start

        def counted(process: Any) -> None:  # noqa: ANN401
            self._starts += 1
            start(process)

        multiprocessing.process.BaseProcess.start = counted  # type: ignore[method-assign, assignment]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        """Attribute the lines that run from here on to this test, including the lines of its fixtures."""
        for fixtures in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
            for fixture in fixtures:
                self.users[_name(fixture)].add(item.nodeid)
        before, began = self._starts, time.process_time()
        with self._within(item.nodeid):
            done = yield
        self.seconds[item.nodeid] = time.process_time() - began
        if self._starts > before:
            self._starting.add(item.nodeid)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Attribute the lines that run from here on to every test that uses this fixture.

        A test whose fixture keeps a process running is left out. A fixture may run a compiler.
        """
        if fixturedef.scope == "function":
            return (yield)
        before, children = self._starts, _children()
        with self._within(_name(fixturedef)):
            made = yield
        if _children() - children:
            self._starting.add(_name(fixturedef))
        self._starts = before
        return made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.left_out[report.nodeid] = report.outcome

    def chosen(self) -> dict[str, float]:
        starting = self._starting.union(*(self.users.get(name, ()) for name in self._starting))
        for test, seconds in self.seconds.items():
            if test in starting:
                self.left_out.setdefault(test, "starts a process")
            if seconds > _LONG_S:
                self.left_out.setdefault(test, f"{seconds:.0f} s")
        quick = [(took, test) for test, took in self.seconds.items() if test not in self.left_out]
        return {test: round(took, 4) for took, test in sorted(quick)}

    def _audit(self, event: str, _: object) -> None:
        self._starts += event in _STARTS

    @contextmanager
    def _within(self, context: str) -> Iterator[None]:
        self._contexts.append(context)
        self._coverage.switch_context(context)
        try:
            yield
        finally:
            self._contexts.pop()
            self._coverage.switch_context(self._contexts[-1])


def _children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def _name(fixture: pytest.FixtureDef[object]) -> str:
    return f"fixture {fixture.argname} of {fixture.baseid}"


def record(paths: Sequence[Path], arguments: Sequence[str], digest: str) -> Tests:
    """Run the tests once in this process, and return what was recorded.

    Raises:
        RuntimeError: the tests could not be run.
    """
    coverage = Coverage(data_file=None, config_file=False, include=[str(path.resolve()) for path in paths])
    recorder = Recorder(coverage)
    coverage.start()
    status = pytest.main(list(arguments), plugins=[recorder])
    coverage.stop()
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status}")
    seconds, data = recorder.chosen(), coverage.get_data()
    number = {test: position for position, test in enumerate(seconds)}
    number[""] = _AT_IMPORT
    lines = {}
    for path in paths:
        contexts = data.contexts_by_lineno(str(path.resolve()))
        lines[str(path)] = {line: _numbers(found, recorder, number) for line, found in contexts.items()}
    return Tests(digest, seconds, recorder.left_out, lines)


def _numbers(contexts: Iterable[str], recorder: Recorder, number: Mapping[str, int]) -> list[int]:
    tests = {test for context in contexts for test in recorder.users.get(context, {context})}
    return sorted(number[test] for test in tests if test in number)
