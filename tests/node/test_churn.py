"""Engines join and leave one machine's memory at random moments, while all of them read each other's.

KVOFFLOAD_CHURN is the number of joins and leaves, KVOFFLOAD_CHURN_ENGINES the most engines at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest

from kvoffload.model.causes import TierOutcome
from kvoffload.model.wire import Tier
from kvoffload.node.folder import list_kept, remove_kept
from tests.conservation import conservation
from tests.core.audit import audit_side
from tests.disk.fork_server import forking
from tests.reference.rig import BLOCK
from tests.reference.test_kills import OnTier
from tests.reference.test_neighbour_processes import MANY

CHANGES = int(os.environ.get("KVOFFLOAD_CHURN", "6"))
MOST = int(os.environ.get("KVOFFLOAD_CHURN_ENGINES", "3"))
SEED = int(os.environ.get("KVOFFLOAD_SEED", "0"))
# Of the transformer's blocks. It makes 64 of the counting model's, and all prompts have 128.
_HOST_BLOCKS = 4
_MOST_ANSWERS = 60  # of an engine between two changes
_PATIENCE_S = 60

pytestmark = pytest.mark.slow


class _Engine(OnTier):
    """One engine, which counts what it reads from others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Tier.HOST, counting=True, host_blocks=_HOST_BLOCKS)
        self.side = self.offload
        assert self.pool.capacity < sum(map(len, MANY)) // BLOCK

    def counts(self) -> Counter[str]:
        """Return the number of neighbours, how many of their blocks were copied or not, and why some were lost."""
        neighbours = self.side.gauges()["kvoffload_neighbours"][()]
        lost = self.side.gauges()["kvoffload_node_lost_blocks_total"]
        outcomes = Counter({outcome.value: blocks for (_, outcome), blocks in self.copies.items()})
        return outcomes + Counter(
            {"neighbours": int(neighbours)} | {cause: int(count) for (cause,), count in lost.items()}
        )

    def close(self) -> list[str]:
        """End the engine; return its broken invariants."""
        problems = audit_side(self.side) + conservation(self.side.counters.snapshot(), drained=True)
        self.engine.close()
        return problems


def serve(folder: Path, seed: int, to_test: Connection) -> None:
    """Serve random prompts and check their tokens, until killed or stopped. Send the counts after each answer."""
    stops = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stops.set())
    random, engine = Random(seed), _Engine(folder)
    while not stops.is_set():
        engine.run(random.choice(MANY))
        to_test.send(engine.counts())
    problems = engine.close()
    assert not problems, problems


class Churn:
    """The engines that run.

    Attributes:
        counts: what all engines have counted so far, including those that have left.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = Random(seed)
        self._running: list[_Process] = []
        self._started = 0
        self.counts: Counter[str] = Counter()

    def change(self) -> None:
        """Let an engine join or leave. The others serve until each has found as many as run, and for a while more."""
        is_full, is_low = len(self._running) == MOST, len(self._running) < 2
        if is_low or not (is_full or self._random.random() < 0.5):
            self._started += 1
            self._running.append(_Process(self._folder, self._started))
        else:
            self._leave(self._random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        for each in self._running:
            while each.counts["neighbours"] < len(self._running) - 1:
                each.answer()
            for _ in range(self._random.randrange(_MOST_ANSWERS)):
                each.answer()

    def end(self) -> None:
        while self._running:
            self._leave(signal.SIGTERM)

    def _leave(self, by: signal.Signals) -> None:
        leaving = self._running.pop(self._random.randrange(len(self._running)))
        self.counts += leaving.end(by)


class _Process:
    """A process with an engine.

    Attributes:
        counts: the last counts that the engine has sent.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        context = forking()
        self._answers, to_test = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(folder, seed, to_test))
        self._process.start()
        to_test.close()
        self.counts: Counter[str] = Counter()

    def answer(self) -> None:
        """Wait for an answer of the engine."""
        assert self._answers.poll(_PATIENCE_S), "an engine does not answer"
        try:
            self.counts = self._answers.recv()
        except EOFError:
            raise AssertionError("an engine has ended by itself, as its output says") from None

    def end(self, by: signal.Signals) -> Counter[str]:
        """End the engine; return its last counts."""
        reading = threading.Thread(target=self._read_on)
        reading.start()  # an engine that cannot send does not end
        assert self._process.pid is not None
        os.kill(self._process.pid, by)
        self._process.join(_PATIENCE_S)
        reading.join()
        assert self._process.exitcode == (0 if by == signal.SIGTERM else -by), "an engine has ended by itself"
        return self.counts

    def _read_on(self) -> None:
        try:
            while True:
                self.counts = self._answers.recv()
        except (EOFError, OSError):
            self._answers.close()


@pytest.mark.timeout(120 + 10 * CHANGES)
def test_r21_engines_that_join_and_leave_at_any_moment_answer_rightly_and_leave_nothing(
    shared_memory: Path,
) -> None:
    """Every lost block has a cause, no copy took longer than its limit, and what is left can be removed."""
    churn = Churn(shared_memory, SEED)
    try:
        for _ in range(CHANGES):
            churn.change()
    finally:
        churn.end()
    counts = churn.counts
    assert counts[TierOutcome.DONE.value] > 0
    assert counts[TierOutcome.CORRUPT.value] == counts[TierOutcome.ABANDONED.value] == 0
    assert counts["torn"] + counts["gone"] >= counts[TierOutcome.FAILED.value]
    kept = list_kept(shared_memory)
    assert len(kept) <= MOST
    assert all(each.is_orphan and remove_kept(each) for each in kept)
    assert not [*shared_memory.rglob("rank*")]
