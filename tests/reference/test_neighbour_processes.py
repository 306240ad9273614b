"""Engines in processes of their own that share memory with one in the test's process, and are killed meanwhile.

`make kills` kills more of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random

import pytest

from kvoffload.model.causes import TierOutcome
from kvoffload.model.wire import Direction, Tier
from kvoffload.runtime.node_catalog import NodeCatalog
from tests.core.audit import audit_side
from tests.disk.fork_server import forking
from tests.reference.rig import BLOCK, text
from tests.reference.test_kills import KILLS, PROMPTS, SEED, OnTier

FIRST = PROMPTS[:4]
MANY = [text(seed, 8 * BLOCK) for seed in range(16)]
FEW_BLOCKS = 24  # so that engines write over blocks while others read them

pytestmark = pytest.mark.slow


class Reader(OnTier):
    """The engine in the test's process."""

    def __init__(self, folder: Path, *, counting: bool, host_blocks: int = 40) -> None:
        super().__init__(folder, Tier.HOST, counting=counting, host_blocks=host_blocks)

    def step_until(self, is_over: Callable[[NodeCatalog], bool]) -> None:
        catalog = self.offload.catalogs[Tier.NODE]
        assert isinstance(catalog, NodeCatalog)
        while not is_over(catalog):
            self.engine.step()


def serve(folder: Path, seed: int, to_test: Connection, counting: bool, goes_on: bool) -> None:
    """Serve all prompts, and again from the host. Send how many blocks were loaded, and go on or rest until killed."""
    host_blocks = FEW_BLOCKS if goes_on else 40
    random, served = Random(seed), OnTier(folder, Tier.HOST, counting=counting, host_blocks=host_blocks)
    for prompt in FIRST[:2] * 2 if goes_on else FIRST * 2:
        served.run(prompt)
    to_test.send(served.fetched)
    while True:
        if goes_on:
            served.run(random.choice(MANY))
        else:
            signal.pause()


def start(folder: Path, seed: int, *, counting: bool, goes_on: bool = True) -> tuple[ForkServerProcess, int]:
    """Return a process that has served prompts, and how many blocks it has loaded from its host memory."""
    context = forking()
    from_engine, to_test = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(folder, seed, to_test, counting, goes_on))
    process.start()
    to_test.close()
    assert from_engine.poll(60), "the engine did not start"
    loaded: int = from_engine.recv()
    from_engine.close()
    return process, loaded


def end(process: ForkServerProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


@pytest.mark.parametrize("counting", [True, False])
def test_the_second_engine_finds_at_least_95_percent_of_what_the_first_one_holds(
    shared_memory: Path, counting: bool
) -> None:
    owner, loaded = start(shared_memory, SEED, counting=counting, goes_on=False)
    reader = Reader(shared_memory, counting=counting)
    reader.step_until(lambda catalog: len(catalog.neighbours) == 1)
    for prompt in FIRST:
        reader.run(prompt)
    end(owner)
    reader.engine.close()
    assert loaded > 0
    assert reader.copied(Direction.LOAD) >= 0.95 * loaded


@pytest.mark.timeout(120 + 5 * KILLS)
@pytest.mark.parametrize("counting", [True, False])
def test_r21_engines_that_are_killed_at_any_moment_leave_others_right(
    shared_memory: Path, counting: bool
) -> None:
    random = Random(SEED)
    reader = Reader(shared_memory, counting=counting, host_blocks=FEW_BLOCKS)
    owners = [start(shared_memory, seed, counting=counting)[0] for seed in range(3)]
    try:
        for kill in range(KILLS):
            reader.step_until(lambda catalog: len(catalog.neighbours) >= 3)
            for _ in range(random.randrange(60)):
                reader.run(random.choice(MANY))
            victim = owners.pop(random.randrange(3))
            end(victim)
            for _ in range(random.randrange(12)):
                reader.run(random.choice(MANY))
            owners.append(start(shared_memory, 3 + kill, counting=counting)[0])
    finally:
        for owner in owners:
            end(owner)
    assert reader.copied(Direction.LOAD) > 0
    assert reader.copied(Direction.LOAD, TierOutcome.CORRUPT) == 0
    assert audit_side(reader.offload) == []
    reader.engine.close()
