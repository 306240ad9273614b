"""Runs tests on mutants. Each mutant runs in a forked process that imports the changed module from memory."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutants.generate import Mutant

PYTEST = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
_LIBRARIES = ("anyio", "hypothesis.stateful", "msgspec", "numpy", "prometheus_client", "rich", "torch")
_MEMORY_BYTES = 4 << 30  # A limit keeps an endless loop from using up the machine's memory.
_PROFILE = "mutants"
_STARTED, _FAILED = "started", "failed"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Trial:
    """A change, and the tests to run with it.

    Args:
        name: the change's name.
        install: makes the change. It is called in the forked process, before the project is imported.
        tests: the tests, in this order.
        limit_s: the seconds after which the process is killed.
    """

    name: str
    install: Callable[[], None]
    tests: Sequence[str]
    limit_s: float


@dataclass(frozen=True)
class Verdict:
    """How a trial ended.

    Args:
        outcome: "killed" if a test failed, "import" if the tests could not be imported, "timeout" or
            "crash" if the process ended early, otherwise "survived".
        by: the tests that failed or during which the process ended. If the trial stops
            at its first failing test, `by` contains only that test.
        seconds: the trial's duration.
    """

    outcome: str
    by: list[str]
    seconds: float


class FromMemory(MetaPathFinder, Loader):
    """Imports a mutant instead of the module's file."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._file = Path(mutant.path).resolve()
        parts = Path(mutant.path).with_suffix("").parts
        self._name = ".".join(parts[1:] if parts[0] == "plugins" else parts)

    def install(self) -> None:
        """Import the mutant instead of the module from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self._file, loader=self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._mutant.compiled(), module.__dict__)


class _Chosen:
    """A pytest plugin that runs the given tests in order, and records their outcomes."""

    def __init__(self, tests: Sequence[str], notes: Path) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._notes = notes.open("w", buffering=1)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(_STARTED, nodeid, file=self._notes)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(_FAILED, report.nodeid, file=self._notes)


class _Run:
    def __init__(self, trial: Trial, is_to_run_all: bool) -> None:
        self.trial = trial
        self._folder = Path(tempfile.mkdtemp(prefix="kvoffload-mutant-"))
        self._began = time.monotonic()
        self.deadline = self._began + trial.limit_s
        self.process = _FORK.Process(target=_run, args=(trial, self._folder, is_to_run_all))
        self.process.start()

    def end(self, *, is_late: bool) -> Verdict:
        """End the process and its children; return the verdict.

        Raises:
            RuntimeError: pytest did not find the tests.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        notes = [line.split(" ", 1) for line in (self._folder / "notes").read_text().splitlines()]
        output = (self._folder / "output").read_text(errors="replace")
        shutil.rmtree(self._folder, ignore_errors=True)
        failed = list(dict.fromkeys(test for what, test in notes if what == _FAILED))
        outcome = "timeout" if is_late else _outcome(self.process.exitcode, failed, output)
        if outcome in ("timeout", "crash"):
            failed += [test for _, test in notes[-1:] if test not in failed]
        return Verdict(outcome, failed, round(time.monotonic() - self._began, 2))


def prepare() -> None:
    """Import what all trials share, except the project, and configure how property tests draw examples."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    # Draw the same examples each time, and do not shrink failing examples.
    settings.register_profile(
        _PROFILE,
        derandomize=True,
        deadline=None,
        max_examples=30,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )
    os.environ["HYPOTHESIS_PROFILE"] = _PROFILE


def in_fork(work: Callable[[], None]) -> None:
    """Run `work` in a forked process.

    Raises:
        RuntimeError: `work` failed.
    """
    process = _FORK.Process(target=work)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process ended with {process.exitcode}")


def hunt(
    trials: Iterable[Trial], processes: int, is_to_run_all: bool = False
) -> Iterator[tuple[Trial, Verdict]]:
    """Try every change, several in parallel; yield each change's verdict.

    A trial ends at its first failing test, unless all tests must run.
    """
    waiting = iter(trials)
    running: dict[int, _Run] = {}
    try:
        while True:
            for trial in islice(waiting, processes - len(running)):
                run = _Run(trial, is_to_run_all)
                running[run.process.sentinel] = run
            if not running:
                return
            ended = wait(running, max(min(run.deadline for run in running.values()) - time.monotonic(), 0))
            for sentinel, run in list(running.items()):
                if sentinel in ended or run.deadline <= time.monotonic():
                    del running[sentinel]
                    yield run.trial, run.end(is_late=sentinel not in ended)
    finally:
        for run in running.values():
            run.end(is_late=True)


def _run(trial: Trial, folder: Path, is_to_run_all: bool) -> None:
    os.setsid()
    plugin = _Chosen(trial.tests, folder / "notes")
    with (folder / "output").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    trial.install()
    files = dict.fromkeys(test.split("::")[0] for test in trial.tests)
    options = [f"--basetemp={folder}/tests", *([] if is_to_run_all else ["-x"])]
    status = pytest.main([*PYTEST, *options, *files], plugins=[plugin])
    sys.stdout.flush()
    os._exit(status)  # Do not wait for threads, because they may hang.


def _outcome(status: int | None, failed: Sequence[str], output: str) -> str:
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f"pytest found no tests:\n{output[-2000:]}")
    if status == pytest.ExitCode.OK:
        return "survived"
    if failed:
        return "killed"
    unread = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    return "import" if status in unread else "crash"
