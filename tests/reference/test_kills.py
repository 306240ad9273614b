"""Ends engines by SIGKILL or SIGTERM at random moments.

The next engine must find each block on the disk, or in host memory in files, and its answers must be right. With `counting`, a model that
only counts replaces the transformer, so that almost all time is spent in the scheduler's and workers' sides.
`make kills` runs 200 kills of each with the counting model and 20 with the real model.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvoffload.core.slots import SlotPool
from kvoffload.disk.index import IndexLog
from kvoffload.engine.runner import Runner
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import Direction, DiskRecord, Invalidate, Put, Tier
from kvoffload.node.table import HostTable
from tests.core.audit import audit_side
from tests.core.below import disk_of
from tests.disk.fork_server import forking
from tests.engine.tiny import assert_same
from tests.reference.rig import BLOCK, TOLERANCE, config_of, plain, slot_bytes, text
from tests.reference.served import NEW_TOKENS, Served
from tests.simulate.counting import VOCABULARY, CountingRunner, expected

KILLS = int(os.environ.get("KVOFFLOAD_KILLS", "6"))
ENGINE_KILLS = int(os.environ.get("KVOFFLOAD_ENGINE_KILLS", "3"))
SEED = int(os.environ.get("KVOFFLOAD_SEED", "0"))
PROMPTS = [text(seed, 8 * BLOCK) for seed in range(6)]
_MOST_ANSWERS = 24

pytestmark = pytest.mark.slow


class OnTier(Served):
    """An engine with two ranks, and a real disk or host memory in files.

    Args:
        folder: where the tier keeps its blocks.
        tier: the tier under test.
        counting: whether the model detects every wrong byte.
        host_blocks: how many blocks fit the host.
        replicas: how many of the ranks share a copy.

    Attributes:
        pool: the slots of the tier under test.
    """

    def __init__(
        self, folder: Path, tier: Tier, *, counting: bool, host_blocks: int = 40, replicas: int = 1
    ) -> None:
        disk_bytes = 2 * (4096 + 60 * (slot_bytes("full", 2) + 4096))
        on_disk: dict[str, object] = {"disk_path": folder, "disk_bytes": disk_bytes}
        extra = on_disk if tier is Tier.DISK else {"host_path": folder}
        config = config_of("full", ranks=2, replicas=replicas, host_blocks=host_blocks, extra=extra)
        if counting:
            config = replace(config, model=replace(config.model, vocab_size=VOCABULARY))
        super().__init__(config, CountingRunner if counting else Runner)
        self._tier, state = tier, self.offload.state
        self.pool: SlotPool = disk_of(state).pool if tier is Tier.DISK else state.pool
        while state.growing or (tier is Tier.DISK and not disk_of(state).is_open):
            self.engine.step()

    @property
    def fetched(self) -> int:
        """How many blocks came from the tier."""
        loaded = self.offload.counters.snapshot().count("kvoffload_load_blocks_total", "loaded")
        return self.copied(Direction.LOAD) if self._tier is Tier.DISK else loaded

    def run(self, prompt: Sequence[int]) -> None:
        """Serve one request, and check its tokens."""
        tokens, runner = self.answer(prompt), self.engine.runner
        if not isinstance(runner, CountingRunner):
            assert_same(tokens, plain("full", prompt, NEW_TOKENS), TOLERANCE)
            return
        assert runner.wrong == []
        facts, tensors = self.engine.facts.groups, self.engine.config.model.layers_per_group
        assert [token.token_id for token in tokens] == expected(facts, tensors, prompt, NEW_TOKENS, 0)


def serve(
    folder: Path,
    tier: Tier,
    seed: int,
    to_test: Connection,
    records: Connection,
    counting: bool,
    replicas: int,
) -> None:
    """Serve until killed or stopped. Send the index, each record, and after each answer the blocks fetched so far."""
    stops = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stops.set())
    _SAY[tier](records)
    random, served = Random(seed), OnTier(folder, tier, counting=counting, replicas=replicas)
    to_test.send({int(slot): bytes(key) for key, slot in served.pool.index.items()})
    while not stops.is_set():
        served.run(random.choice(PROMPTS))
        to_test.send(served.fetched)
    served.engine.close()


def say_changes(to_test: Connection) -> None:
    """Send each slot of the host before it is invalidated, and after it is published."""
    invalidate, publish = HostTable.invalidate, HostTable.publish

    def say_invalid(self: HostTable, slot: SlotId) -> None:
        to_test.send((int(slot), None))
        invalidate(self, slot)

    def say_publish(self: HostTable, slot: SlotId, key: BlockKey, used_at: float) -> None:
        publish(self, slot, key, used_at)
        to_test.send((int(slot), bytes(key)))

    HostTable.invalidate, HostTable.publish = say_invalid, say_publish  # type: ignore[method-assign]


def say_records(to_test: Connection) -> None:
    """Send each invalidation before it is written, and each put after it is written."""
    real = IndexLog.append

    def append(self: IndexLog, records: Sequence[DiskRecord]) -> None:
        for record in records:
            if isinstance(record, Invalidate):
                to_test.send((int(record.slot), None))
        real(self, records)
        for record in records:
            if isinstance(record, Put):
                to_test.send((int(record.slot), bytes(record.key)))

    IndexLog.append = append  # type: ignore[method-assign]  # in a process of its own


_SAY = {Tier.DISK: say_records, Tier.HOST: say_changes}


class Lives:
    """Successive processes that use one folder.

    Attributes:
        held: for each slot, the key of its last put, unless the slot has been invalidated since then.
        fetched: the number of blocks that came from the tier.
    """

    def __init__(
        self, folder: Path, tier: Tier, context: ForkServerContext, *, counting: bool, replicas: int
    ) -> None:
        self._folder, self._tier, self._context = folder, tier, context
        self._counting, self._replicas = counting, replicas
        self.held: dict[int, bytes] = {}
        self.fetched = self.restored = 0

    def live(self, seed: int) -> None:
        """Run one process: check the blocks that it finds, let it serve for a while, and end it."""
        random = Random(f"life {seed}")
        from_engine, to_test = self._context.Pipe(duplex=False)
        from_index, records = self._context.Pipe(duplex=False)
        arguments = (self._folder, self._tier, seed, to_test, records, self._counting, self._replicas)
        process = self._context.Process(target=serve, args=arguments)
        process.start()
        to_test.close()
        records.close()
        noted: list[tuple[int, bytes | None]] = []
        noting = threading.Thread(target=_collect, args=(from_index, noted))
        noting.start()
        assert from_engine.poll(60), "the engine did not start"
        found: dict[int, bytes] = from_engine.recv()
        lost = self.held.items() - found.items()
        assert not lost, f"{len(lost)} blocks were put, not invalidated, and are not found"
        self.restored += len(found)
        answers = [from_engine.recv() for _ in range(random.choice([0, 1, random.randrange(_MOST_ANSWERS)]))]
        while not (found or noted):  # the first process must leave at least one block
            answers.append(from_engine.recv())
        self._end(process, random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        _collect(from_engine, answers)
        self.fetched += max(answers, default=0)
        noting.join()
        self.held = found
        for slot, key in noted:
            self.held.pop(slot, None)
            if key is not None:
                self.held[slot] = key

    def _end(self, process: ForkServerProcess, by: signal.Signals) -> None:
        assert process.pid is not None
        os.kill(process.pid, by)
        process.join(60)
        assert process.exitcode == (0 if by == signal.SIGTERM else -by), "it ended by itself"


def _collect(source: Connection, into: list[Any]) -> None:
    try:
        while True:
            into.append(source.recv())
    except (EOFError, OSError):
        return


@pytest.mark.timeout(60 + 20 * max(KILLS, ENGINE_KILLS))
@pytest.mark.parametrize("tier", [Tier.DISK, Tier.HOST])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("counting", "kills"), [(True, KILLS), (False, ENGINE_KILLS)])
def test_after_a_kill_or_stop_the_next_engine_finds_all_put_blocks_and_answers_correctly(
    tmp_path: Path, shared_memory: Path, tier: Tier, replicas: int, counting: bool, kills: int
) -> None:
    context = forking()
    folder = tmp_path if tier is Tier.DISK else shared_memory
    lives = Lives(folder, tier, context, counting=counting, replicas=replicas)
    for seed in range(SEED, SEED + kills):
        try:
            lives.live(seed)
        except AssertionError as error:
            raise AssertionError(f"KVOFFLOAD_SEED={seed}: {error}") from error
    last = OnTier(folder, tier, counting=counting, replicas=replicas)
    assert lives.held.keys() <= set(map(int, last.pool.index.values()))
    for prompt in PROMPTS:
        last.run(prompt)
    assert lives.restored
    assert last.fetched + lives.fetched
    assert audit_side(last.offload) == []
    last.engine.close()
