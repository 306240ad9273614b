"""Runs mixed traffic on a stock vLLM that needs far more blocks than the host has, with aborts, resets and
restarts.

The requests need at least 4 times the host's blocks and 20 times the device's blocks. Every answer must equal
that of an engine without a connector and without prefix caching. When an engine ends, its audit must find no
problem.

    python -m tests.vllm.disk_traffic [--seeds 1 2] [--ranks 1 2] [qwen3 gemma3 lfm2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.vllm.engine_rig import Asked, Reported, check_same, plain
from tests.vllm.stock import checkpoints, engines
from tests.vllm.tiers_rig import KINDS, LOAD, Life, living

DEVICE_BLOCKS: Mapping[checkpoints.Kind, int] = {"qwen3": 16, "gemma3": 32, "lfm2": 32}
"""The device has enough blocks for the longest request and a few others."""
HOST_TIMES, DEVICE_TIMES = 4, 20
"""The requests need at least this many times the blocks of the host, and of the device."""
LONGEST = 320
AT_ONCE = 5
STORIES = 120
_NAMES = 0
Turn = tuple[int, int]  # the number of a conversation, and the number of a turn in this conversation


def conversations(seed: int, count: int = STORIES) -> dict[Turn, Asked]:
    """Return the turns of `count` conversations, three turns each. A quarter of them share a prefix."""
    draw = random.Random(seed)
    stem = draw.choices(range(256), k=3 * engines.BLOCK)
    turns = {}
    for number in range(count):
        text = list(stem) if number % 4 == 0 else []
        for turn in range(3):
            text += draw.choices(range(256), k=draw.randrange(50, 70))
            turns[number, turn] = Asked(tuple(text), draw.randrange(2, 6))
    return turns


@dataclass
class Traffic:
    kind: checkpoints.Kind
    folder: Path
    ranks: int
    seed: int
    turns: dict[Turn, Asked] = field(init=False)
    expected: dict[Turn, Reported] = field(init=False)
    draw: random.Random = field(init=False)
    asked: int = 0
    error: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    seen: set[bytes] = field(default_factory=set)
    """The keys of all blocks of requests. How many of them reach the host depends on the machine's speed."""

    def __post_init__(self) -> None:
        self.turns = conversations(self.seed)
        self.draw = random.Random(self.seed)
        with plain(self.kind, self.folder, num_gpu_blocks_override=512, enable_prefix_caching=False) as rig:
            answers = rig.run({_name(turn): one for turn, one in self.turns.items()})
        self.expected = {turn: answers[_name(turn)] for turn in self.turns}

    @property
    def device_blocks(self) -> int:
        return DEVICE_BLOCKS[self.kind]

    @property
    def host_blocks(self) -> int:
        return self.device_blocks * DEVICE_TIMES // HOST_TIMES

    @contextmanager
    def life(self) -> Iterator[Life]:
        """Run an engine on this folder's disk during the `with` block, and check the engine's state
        afterwards.
        """
        options: dict[str, Any] = {
            "num_gpu_blocks_override": self.device_blocks,
            "max_model_len": LONGEST,
            "host_blocks": self.host_blocks,
            "extra": {"disk_bytes": "64MiB"},
        }
        environment = {}
        if self.ranks > 1:
            options |= {"tensor_parallel_size": self.ranks, "distributed_executor_backend": "mp"}
            environment = engines.TWO_WORKERS["environment"]
        with patch.dict("os.environ", environment), living(self.kind, self.folder, **options) as life:
            self.counts["restored"] += life.restored
            yield life
            assert life.disk.is_open
            life.rig.check_clean()
            self.counts["fetched"] += life.copied(LOAD)
            self.counts["on disk"] = life.on_disk()

    def play(self, life: Life, turns: Sequence[Turn], *, reset_at: int | None = None) -> None:
        """Run these turns, up to `AT_ONCE` concurrently. Abort some, and compare all other answers."""
        rig, waiting, running = life.rig, deque(turns), dict[str, Turn]()
        while waiting or running:
            while waiting and len(running) < AT_ONCE and self.draw.random() < 0.7:
                self.asked += 1
                turn = waiting.popleft()
                running[name := f"{_name(turn)}n{self.asked}"] = turn
                rig.ask(name, self.turns[turn])
            if running and self.draw.random() < 0.03:
                name = self.draw.choice(list(running))
                del running[name]
                rig.abort(name)
                self.counts["aborted"] += 1
            if reset_at is not None and len(waiting) <= reset_at:
                rig.scheduler.reset_prefix_cache(reset_connector=True)
                reset_at = None
            rig.step()
            for record in rig.side.core.state.requests.live.values():
                self.seen.update(*record.keys)
            for name in [name for name in running if rig.is_done(name)]:
                self._check(rig.reported[name], self.expected[running.pop(name)])

    def _check(self, answer: Reported, expected: Reported) -> None:
        check_same({"it": answer}, {"it": expected})
        pairs = zip(answer.logprobs, expected.logprobs, strict=True)
        self.error = max(self.error, *(abs(one - other) for one, other in pairs))
        self.counts["compared"] += 1
        self.counts["found"] += answer.cached

    def first_turns(self) -> list[Turn]:
        """Return the first two turns of each conversation, and repeat some.

        A conversation's two turns are close together, so that the second turn finds the first turn's blocks.
        """
        order = []
        for number in range(STORIES):
            order += [(number, 0), (max(number - 1, 0), 1)]
            order += [(self.draw.randrange(number + 1), 1)] * (self.draw.random() < 0.4)
        return order

    def later_turns(self) -> list[Turn]:
        order = [(number, self.draw.randrange(1, 3)) for number in range(STORIES)]
        self.draw.shuffle(order)
        return order


def run(traffic: Traffic) -> None:
    """Run five engines, one after the other, on one folder. The third serves nothing, and the fourth is reset
    in the middle.
    """
    with traffic.life() as life:
        assert life.restored == 0
        traffic.play(life, traffic.first_turns())
    assert len(traffic.seen) >= HOST_TIMES * traffic.host_blocks
    assert len(traffic.seen) >= DEVICE_TIMES * traffic.device_blocks
    with traffic.life() as life:
        kept = life.restored
        traffic.play(life, traffic.later_turns())
        assert life.copied(LOAD) > 0
    with traffic.life() as life:
        assert life.restored >= kept > 0
    with traffic.life() as life:
        assert life.restored >= kept
        later = traffic.later_turns()
        traffic.play(life, later, reset_at=len(later) // 2)
        assert life.copied(LOAD) > 0
        traffic.play(life, traffic.first_turns()[: STORIES // 2])
    with traffic.life() as life:
        assert life.restored == 0  # no engine finds the blocks of an engine that was reset
        traffic.play(life, traffic.first_turns()[: STORIES // 4])


def _name(turn: Turn) -> str:
    return f"c{turn[0]}t{turn[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="mixed traffic on a disk below a stock vLLM")
    parser.add_argument("models", nargs="*", default=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    # Run each model in a separate process, so that its memory is freed.
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        runs = [
            pool.submit(_run_and_report, *each) for each in product(asked.ranks, asked.models, asked.seeds)
        ]
    for each in runs:
        each.result()


def _run_and_report(ranks: int, kind: checkpoints.Kind, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvoffload-traffic-") as folder:
        traffic = Traffic(kind, Path(folder), ranks, seed)
        run(traffic)
    counts = traffic.counts
    sys.stdout.write(
        f"{kind}, {ranks} ranks, seed {seed}: {traffic.asked} requests, {counts['aborted']} of them aborted, "
        f"{len(traffic.seen) / traffic.host_blocks:.1f} times the host, "
        f"{len(traffic.seen) / traffic.device_blocks:.1f} times the device; "
        f"{counts['restored']} blocks found at starts, {counts['fetched']} fetched, "
        f"{counts['found']:,} tokens found; log-probabilities differ by at most {traffic.error:.0e}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
