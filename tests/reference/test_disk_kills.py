"""SIGKILL of a whole engine at random moments: the next one on its folder answers the same tokens, and finds blocks there.

KVOFFLOAD_ENGINE_KILLS=20 makes more of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest

from kvoffload.engine import Engine, SamplingParams, Token
from kvoffload.model.causes import DiskOutcome
from kvoffload.model.events import DiskCopyEnded, DiskOpened
from kvoffload.model.transfer import Direction
from kvoffload_reference.plugin import ReferencePlugin
from tests.engine.tiny import assert_same, taken
from tests.reference.rig import BLOCK, TOLERANCE, config_of, plain, slot_bytes, text

KILLS = int(os.environ.get("KVOFFLOAD_ENGINE_KILLS", "4"))
PROMPTS = [text(seed, 8 * BLOCK) for seed in range(6)]
NEW_TOKENS = 4

pytestmark = pytest.mark.slow


class Served:
    """A real engine with the plugin, on real threads and a real disk."""

    def __init__(self, folder: Path) -> None:
        self.plugin = ReferencePlugin()
        extra: dict[str, object] = {
            "disk_path": folder,
            "disk_bytes_per_rank": 4096 + 200 * (slot_bytes("full", 2) + 4096),
        }
        self.engine = Engine(
            config_of("full", ranks=2, host_blocks=40, extra=extra), self.plugin, clock=time.monotonic
        )
        assert self.plugin.offload is not None
        self.fetched = self.restored = 0
        self.is_open = False
        self.plugin.offload.bus.count(DiskCopyEnded, self._copied)
        self.plugin.offload.bus.count(DiskOpened, self._opened)
        while not self.is_open:
            self.engine.step()

    def _copied(self, event: DiskCopyEnded) -> None:
        if (event.direction, event.outcome) == (Direction.LOAD, DiskOutcome.DONE):
            self.fetched += event.blocks

    def _opened(self, event: DiskOpened) -> None:
        self.is_open, self.restored = True, event.blocks

    def run(self, prompt: Sequence[int]) -> list[Token]:
        """Serve one request that finds nothing on the device."""
        assert self.engine.pool.reset_prefix_cache()
        stream = self.engine.submit(prompt, SamplingParams(NEW_TOKENS))
        while self.engine.has_work:
            self.engine.step()
        return taken(stream)


def serve_until_killed(folder: Path, seed: int, to_test: Connection) -> None:
    random = Random(seed)
    served = Served(folder)
    to_test.send(("open", served.restored))
    for number in range(10_000):
        at = number % len(PROMPTS) if number < len(PROMPTS) else random.randrange(len(PROMPTS))
        to_test.send((at, served.run(PROMPTS[at])))


@pytest.mark.timeout(60 + 20 * KILLS)
def test_after_a_kill_at_any_moment_the_next_engine_answers_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.reference.test_disk_kills"])
    restored = 0
    for seed in range(KILLS):
        from_engine, to_test = context.Pipe(duplex=False)
        process = context.Process(target=serve_until_killed, args=(tmp_path, seed, to_test))
        process.start()
        to_test.close()
        assert from_engine.poll(60), f"seed {seed}: the engine did not start"
        what, restored = from_engine.recv()
        assert what == "open"
        for _ in range(Random(seed).randint(8, 30)):
            at, tokens = from_engine.recv()
            assert_same(tokens, plain("full", PROMPTS[at], NEW_TOKENS), TOLERANCE)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"seed {seed}"
    last = Served(tmp_path)
    for prompt in PROMPTS:
        assert_same(last.run(prompt), plain("full", prompt, NEW_TOKENS), TOLERANCE)
    assert restored or last.restored
    assert last.fetched
    assert last.plugin.offload is not None
    assert last.plugin.offload.audit() == []
    last.engine.close()
