from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.telemetry.journal import JournalFile
from tests.cli.conftest import SMALL

PATIENCE_S = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S)]


@dataclass
class Demo:
    """A `kvoffload demo` with one copy that runs until the test sends a line."""

    process: subprocess.Popen[str]
    journal: Path
    url: str = ""
    shared: set[Path] = field(default_factory=set)

    @property
    def errors(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def wait_for_a_copy(self) -> None:
        self.url = self.read_until("metrics are at ").split("metrics are at ")[1].split()[0]
        self.read_until("a copy runs")
        assert self.open_jobs() > 0
        self.shared = shared_memory(self.process.pid)

    def read_until(self, words: str) -> str:
        """Return the output up to and including the line that contains `words`."""
        read = ""
        while words not in read:
            line = self.errors.readline()
            assert line, read
            read += line
        return read

    def open_jobs(self) -> float:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvoffload_open_jobs{"))

    def check_nothing_is_left(self) -> None:
        """Check that no process, memory or port is left, and that the journal can be opened again."""
        JournalFile(self.journal).close()
        assert "StoreScheduled" in self.journal.read_text()
        assert not [process for process in Path("/proc").glob("[0-9]*") if self._is_member(process)]
        assert not [path for path in self.shared if path.exists()]
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(self.url, timeout=5)

    def _is_member(self, process: Path) -> bool:
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            return False
        return int(session) == self.process.pid and state != "Z"


def start(journal: Path) -> Demo:
    """Start a demo with SIGINT ignored, as a shell script starts a background process."""
    argv = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "tests.faults.held_demo"]
    argv += SMALL.format(blocks=26).split()
    process = subprocess.Popen(
        [*argv, "--serve-metrics", "0", "--config", f"journal_path={journal}"],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment(),
    )
    return Demo(process, journal)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Demo]]:
    """Start two demos in parallel, one per test, each with a running copy."""
    made = [start(tmp_path_factory.mktemp("demo") / "journal") for _ in range(2)]
    try:
        for one in made:
            one.wait_for_a_copy()
        yield iter(made)
    finally:
        for one in made:
            one.process.kill()
            one.process.communicate(timeout=PATIENCE_S)


def environment() -> dict[str, str]:
    """Return variables for a program that imports an installed wheel, or else this checkout."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def shared_memory(process: int) -> set[Path]:
    words = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    return {Path(line[5]) for line in words if len(line) > 5 and line[5].startswith("/dev/shm/")}


def test_after_sigterm_the_demo_waits_for_its_copies(demos: Iterator[Demo]) -> None:
    made = next(demos)
    made.process.send_signal(signal.SIGTERM)
    made.read_until("interrupted: open requests are cancelled, and submitted copies drain")
    assert made.process.poll() is None  # the demo is waiting for its copy
    _, said = made.process.communicate("go on\n", timeout=PATIENCE_S)
    assert "copies that were submitted have ended; the audit passed" in said
    assert made.process.returncode == Exit.TERMINATED
    made.check_nothing_is_left()


def test_a_killed_demo_leaves_no_process_memory_or_port(demos: Iterator[Demo]) -> None:
    made = next(demos)
    while "StoreScheduled" not in made.journal.read_text():
        assert made.open_jobs() > 0
    made.process.kill()
    assert made.process.wait(PATIENCE_S) == -signal.SIGKILL
    made.check_nothing_is_left()


ODD = """
import importlib, os, sys
import kvoffload_reference.plugin, kvoffload.telemetry.exporter, kvoffload.core.offload_core  # from the top down
import kvoffload.runtime.worker_side, kvoffload.bus.bus, kvoffload.engine, kvoffload
from importlib.metadata import entry_points
from kvoffload.engine import Engine, SamplingParams
from tests.engine.tiny import tiny_config, taken

(point,) = [one for one in entry_points(group="kvoffload.engine_plugins") if one.name == "kvoffload"]
first = point.load()
again = importlib.reload(sys.modules["kvoffload_reference.plugin"]).plugin
for name in [name for name in sys.modules if name.startswith("kvoffload_reference")]:
    del sys.modules[name]
third = point.load()
assert len({first, again, third}) == 3 and type(first()) is not type(third())

def make(plugin):
    engine = Engine(tiny_config(plugin_config={"host_bytes": "1MiB"}), plugin, clock=lambda: 0.0)
    while not plugin.offload.gauges()["kvoffload_capacity_slots"]["host",]:
        engine.step()
    return engine

def serve(engine):
    stream = engine.submit(tuple(range(30)), SamplingParams(4))
    while engine.has_work:
        engine.step()
    return [token.token_id for token in taken(stream)], stream.stats.external_tokens > 0

def check(engine):
    assert serve(engine) == (right, False)
    assert engine.pool.reset_prefix_cache()
    assert serve(engine) == (right, True)
    assert engine.audit() == []

plain = Engine(tiny_config(), clock=lambda: 0.0)
right, _ = serve(plain)
engines = [make(one()) for one in (first, again, third)]  # all in one process at once
for engine in engines[1:]:
    check(engine)
child = os.fork()                                           # every portal runs in the parent, and none in the child
if child == 0:
    check(make(third()))
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check(engines[0])
for engine in engines:
    engine.close()
print("well")
"""


def test_modules_can_be_imported_in_any_order_and_twice_and_forked() -> None:
    """The program imports the plugin's modules three times, starts an engine with each, and forks while the
    engines' threads run.
    """
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", ODD]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
