"""Sends SIGTERM or SIGKILL to a stock vLLM's engine or to one of its two workers, during loads.

The process that receives requests serves from one engine after another. Each test ends an engine and starts
the next one, which finds the earlier engine's blocks on the disk. vLLM forks its processes here. Spawning
them, the default on a CPU, would take a minute longer and not change how they end.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvoffload.disk.index import load_index
from kvoffload.disk.open_folder import open_folder
from kvoffload.telemetry.journal import JournalFile
from tests.remote.servers import Mooncake, suspend
from tests.vllm.copy_gate import CLOSED, CLOSING, CopyGate, HeldCopy
from tests.vllm.deaths_rig import Front, fronting
from tests.vllm.engine_rig import MARKS
from tests.vllm.serve.serve_rig import BLOCK, Prompt, check_log, draw, processes, shared_memory, until
from tests.vllm.stock import checkpoints

pytestmark = [*MARKS, pytest.mark.full]

PROMPTS = draw(1, 3, 200)
FOUND = 192  # the tokens in a prompt's whole blocks
RANKS = 2
VLLMS_OWN = re.compile(r"[0-9a-f-]{36}")  # vLLM always leaves sockets with such names
DEAD = {"error": "EngineDeadError"}
KILLS = int(os.environ.get("KVOFFLOAD_VLLM_KILLS", "1"))


@dataclass
class Life:
    """An engine that has served prompts, and what must be gone when the engine has ended."""

    front: Front
    gate: CopyGate
    folder: Path
    answers: list[list[int]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    shared: set[Path] = field(default_factory=set)

    @property
    def engine(self) -> int:
        (process,) = [one for one, name in self.processes.items() if name == "VLLM::EngineCore"]
        return process

    def begin(self) -> None:
        """Start an engine, and serve the prompts until all their blocks are on the host and on the disk."""
        self.gate.forget()
        opened = self._times_opened()
        self.front.do("start", workers=RANKS)
        right = None
        while right is None or self._times_opened() == opened:
            right = [one["tokens"] for one in self._ask(salt="truth")]
        assert right == (self.answers or right)
        is_first, self.answers = not self.answers, right
        found = [one["cached"] for one in self._check_served()]
        assert found == [0 if is_first else FOUND] * len(PROMPTS)
        while min(one["cached"] for one in self._check_served()) < FOUND:
            self.front.do("forget")
        while self.on_disk() < len(PROMPTS) * FOUND // BLOCK:
            self._check_served()
        self.front.do("forget")
        self.processes = processes(self.front)
        self.shared = shared_memory(self.front)
        assert self.shared  # the queues between the engine and its workers

    def on_disk(self) -> int:
        """Return how many blocks a new engine would find on the disk."""
        (folder,) = self.folder.glob("disk/*/replica0")
        with open_folder(folder, folder.parent.name) as opened:
            index = load_index(opened, 2**20)
        return len(index.entries) if index is not None else 0

    def _times_opened(self) -> int:
        return self.front.log.read_text().count("disk_opened")

    def start_loads(self) -> list[HeldCopy]:
        """Send a prompt that is only on the host. Return each worker's load, which is held."""
        self.gate.hold()
        self.front.say("ask", prompts=PROMPTS[:1])
        held = [self.gate.next_held() for _ in range(RANKS)]
        assert {self.processes[one.process] for one in held} == {"VLLM::Worker_TP0", "VLLM::Worker_TP1"}
        return held

    def release(self, *held: HeldCopy) -> None:
        for one in held:
            one.release()
        assert all(one.came_to_its_end() for one in held)

    def check_closing(self, *held: HeldCopy) -> None:
        """Check that the workers of these copies are closing their connectors."""
        assert {self.gate.next_closing() for _ in held} == {(CLOSING, one.process) for one in held}

    def check_closed(self, *held: HeldCopy) -> None:
        """Check that the workers of these copies have closed their connectors, and that no copy was running
        then.
        """
        seen = {one.process: b"" for one in held}
        while CLOSING in seen.values() or b"" in seen.values():
            reason, process = self.gate.next_closing()
            seen[process] = reason
        assert set(seen.values()) == {CLOSED}

    def check_over(self) -> None:
        """Check that the engine left only vLLM's own files, that requests get an error, and that a new engine
        serves prompts.
        """
        until(lambda: set(processes(self.front)) == {self.front.process.pid}, 60)
        assert not [path for path in self.shared if path.exists()]
        sockets = {one.name for one in self.folder.iterdir() if one.is_socket()}
        assert {one for one in sockets if not VLLMS_OWN.fullmatch(one)} == {"gate"}
        assert self._ask() == [DEAD] * len(PROMPTS)
        self.front.do("stop")
        check_log(self.front)
        JournalFile(self.folder / "journal").close()  # opening the journal fails if a process still uses it
        self.gate.open()
        self.begin()

    def check_served(self, prompts: Sequence[Prompt]) -> None:
        """Check that the answers equal those that are computed without a cache."""
        right = self.front.do("ask", prompts=prompts, salt="truth")["answers"]
        for _ in range(2):
            answers = self.front.do("ask", prompts=prompts)["answers"]
            assert [one["tokens"] for one in answers] == [one["tokens"] for one in right]
            self.front.do("forget")

    def _check_served(self) -> list[dict[str, Any]]:
        served = self._ask()
        assert [one["tokens"] for one in served] == self.answers
        return served

    def _ask(self, **words: Any) -> list[dict[str, Any]]:
        return list(self.front.do("ask", prompts=PROMPTS, **words)["answers"])


@pytest.fixture(scope="module", params=[2, 1], ids=["different", "shared"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """With one KV head the two workers share one copy of each block, on the host and on the disk."""
    folder = tmp_path_factory.mktemp("life")
    with fronting(folder / "qwen3", folder) as (front, gate):
        # meanwhile, the other process imports vLLM
        checkpoints.make("qwen3", folder / "qwen3", num_key_value_heads=request.param)
        made = Life(front, gate, folder)
        made.begin()
        yield made
        front.do("stop")
        until(lambda: set(processes(front)) == {front.process.pid}, 60)
        assert not [path for path in made.shared if path.exists()]
        check_log(front)


def test_an_engine_that_gets_sigterm_waits_for_its_copies(life: Life) -> None:
    """Without `--shutdown-timeout`, vLLM aborts the requests at once, but open copies still use the requests'
    blocks.
    """
    held = life.start_loads()
    os.kill(life.engine, signal.SIGTERM)
    (answer,) = life.front.hear()["answers"]
    assert (answer["reason"], answer["tokens"]) == ("abort", [])
    life.release(*held)
    life.check_closed(*held)
    life.check_over()


def test_workers_of_a_killed_engine_wait_for_their_copies(life: Life) -> None:
    held = life.start_loads()
    os.kill(life.engine, signal.SIGKILL)
    life.check_closing(*held)
    life.release(*held)
    life.check_closed(*held)
    assert life.front.hear()["answers"] == [DEAD]
    assert "engine core exited unexpectedly" in life.front.log.read_text()
    life.check_over()


def test_a_killed_worker_ends_its_engine(life: Life) -> None:
    killed, other = life.start_loads()
    os.kill(killed.process, signal.SIGKILL)
    assert not killed.came_to_its_end()
    life.check_closing(other)
    life.release(other)
    life.check_closed(other)
    assert life.front.hear()["answers"] == [DEAD]
    assert re.search(
        r"Worker proc \S+ died unexpectedly \(exit code: (-9|None)\)", life.front.log.read_text()
    )
    life.check_over()


def test_a_worker_that_gets_sigterm_waits_for_its_copies(life: Life) -> None:
    reported, other = life.start_loads()
    os.kill(reported.process, signal.SIGTERM)
    life.check_closing(reported)
    life.release(reported)
    life.check_closed(reported)
    life.check_closing(other)  # the engine ends the other worker too
    life.release(other)
    life.check_closed(other)
    assert life.front.hear()["answers"] == [DEAD]
    life.check_over()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("seed", range(KILLS))
def test_after_a_kill_at_any_moment_the_next_engine_finds_all_put_blocks(
    life: Life, seed: int, how: signal.Signals
) -> None:
    """KVOFFLOAD_VLLM_KILLS sets the number of seeds."""
    chance = random.Random(seed)
    turns = [
        (*prompt[: chance.randrange(64, 200)], *tail)
        for prompt, tail in zip(PROMPTS * 4, draw(seed + 100, 12, 150), strict=True)
    ]
    life.front.do("ask", prompts=turns[:6])
    life.front.say("ask", prompts=turns)
    time.sleep(chance.uniform(0, 1.5))
    names = ["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"]
    victim = chance.choice(names)
    os.kill(next(process for process, name in life.processes.items() if name == victim), how)
    life.front.hear()
    life.check_over()
    life.check_served(turns)


def test_an_engine_ends_while_a_call_to_a_store_hangs(life: Life, mooncake: Mooncake) -> None:
    """The hanging call itself returns only after 30 s."""
    life.front.do("stop")
    life.front.do("start", workers=RANKS, remote_url=mooncake.url, remote_timeout_s=1.0)
    log = life.front.log
    while "remote_opened" not in log.read_text():
        life.front.do("ask", prompts=PROMPTS)
    suspend(mooncake.master)
    seed = 1000
    while "remote_fails" not in log.read_text():
        life.front.do("ask", prompts=draw(seed := seed + 1, 1, 200))
    (engine,) = [one for one, name in processes(life.front).items() if name == "VLLM::EngineCore"]
    os.kill(engine, signal.SIGTERM)
    until(lambda: set(processes(life.front)) == {life.front.process.pid}, 60)
    assert "remote_call_returned" not in log.read_text()
    life.front.do("stop")
    check_log(life.front)
    life.gate.open()
    life.begin()
