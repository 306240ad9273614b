"""Whether anything grows while requests come and go on a full host: time in hooks, longest hooks, resident memory.

Requests come as others end, so that always as many are there. Half of them begin a conversation, half go on with a
recent one and bring everything said before: part of it is on the host and is loaded, part was evicted. The device's own
prefix cache is left out, so that all that is reused is loaded. What is kept beside the side is bounded, so that what
grows is the side's; and it runs in a process of its own, as memory that other parts left behind would hide growth.
Times are the processor's, of the thread: the run is long, and what else the machine does meanwhile is not of interest.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from kvoffload.bench.scale.engineless import BLOCK_TOKENS, Engineless, Speeds, fresh_keys
from kvoffload.bench.scale.idle import resting_collector
from kvoffload.bench.scale.memory import resident_bytes
from kvoffload.cli.exits import CommandError
from kvoffload.model.ids import BlockKey, DeviceBlockId, RequestId

RUNNING = 64
READINGS = 10
LEAST = RUNNING * READINGS
"""Requests: with fewer, a reading might be of no step."""
_DEVICE_BLOCKS = 32 * RUNNING * 4
_FIRST, _MORE, _MOST = 8, 4, 32  # blocks: of a first turn, that each turn adds, of the longest
_RECENT = 1024  # conversations that may go on
_DECODING = (4, 12)  # steps that a request runs after its prompt, from and to
_MIB = 2**20
_MERGE_STEPS = 4  # as vLLM's adapter has it


@dataclass(frozen=True, slots=True)
class Reading:
    """One tenth of the run.

    Args:
        requests: that ended until its end.
        step_us, request_us: in hooks, over its steps and over its requests.
        longest_us: the longest time in the hooks of one step.
        resident_mib: of the process, at its end.
        found: share of the blocks looked up that were on the host.
    """

    requests: int
    step_us: float
    request_us: float
    longest_us: float
    resident_mib: float
    found: float

    def to_plain(self) -> dict[str, float]:
        """The fields, for JSON."""
        return {
            name: value if name == "requests" else float(f"{value:.5g}")
            for name, value in asdict(self).items()
        }


@dataclass(slots=True)
class _Running:
    """A request that the engine has: its keys, and how far it is."""

    request: RequestId
    keys: list[BlockKey]
    table: tuple[DeviceBlockId, ...] = ()
    is_loading: bool = False
    steps: int = 0
    last_step: int = 0


def measure(
    requests: int, slots: int, speeds: Speeds, told: Callable[[Reading], object] = lambda _: None
) -> list[Reading]:
    """Stream so many requests over a host of so many slots that is full from the start; `told` hears each reading.

    Raises:
        CommandError: the process ended before the last reading, as one does that gets no memory.
    """
    command = [sys.executable, "-m", __name__, json.dumps([requests, slots, asdict(speeds)])]
    readings = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                readings.append(Reading(**json.loads(line)))
                told(readings[-1])
        except BaseException:
            process.kill()  # leaving the block waits for its end
            raise
    if process.returncode:
        raise CommandError(f"the process with {slots:,} slots ended with {process.returncode}")
    return readings


def stream(requests: int, slots: int, speeds: Speeds) -> Iterator[Reading]:
    """Measure here, and yield each reading."""
    rig, draw = Engineless(slots, _DEVICE_BLOCKS, speeds, _MERGE_STEPS, time.thread_time), random.Random(0)
    rig.fill(draw, slots)
    coming = Stream(rig, draw)
    with resting_collector():
        for number in range(READINGS):
            yield coming.read(requests * (number + 1) // READINGS)
    problems = rig.side.audit()
    assert not problems, problems


@dataclass(slots=True)
class Stream:
    """Requests that come and go on one side.

    Args:
        rig: the side.
        draw: who comes.
    """

    rig: Engineless
    draw: random.Random
    _waiting: list[_Running] = field(default_factory=list)
    _running: dict[RequestId, _Running] = field(default_factory=dict)
    _recent: deque[list[BlockKey]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _come: int = 0
    _gone: int = 0
    _looked_up: int = 0
    _found: int = 0

    def read(self, until: int) -> Reading:
        """Go on until so many requests have ended."""
        rig, gone, steps, spent = self.rig, self._gone, self.rig.steps, self.rig.hook_s
        self._looked_up = self._found = 0
        longest = 0.0
        while self._gone < until:
            begun = rig.hook_s
            self._step()
            longest = max(longest, rig.hook_s - begun)
        gc.collect()
        spent, requests = 1e6 * (rig.hook_s - spent), max(self._gone - gone, 1)
        return Reading(
            self._gone,
            spent / max(rig.steps - steps, 1),
            spent / requests,
            1e6 * longest,
            resident_bytes() / _MIB,
            self._found / max(self._looked_up, 1),
        )

    def _step(self) -> None:
        while len(self._waiting) + len(self._running) < RUNNING:
            self._waiting.append(self._arrive())
        self._waiting = [one for one in self._waiting if not self._admit(one)]
        confirmed = [
            (one.request, len(one.keys) * BLOCK_TOKENS)
            for one in self._running.values()
            if not one.is_loading and not one.steps
        ]
        decoding = sum(1 for one in self._running.values() if one.steps)
        results = self.rig.step(confirmed, decode_tokens=decoding)
        assert not results.failed
        for request in results.loaded:
            self._running[request].is_loading = False
        self._age({request for request, _ in confirmed})

    def _arrive(self) -> _Running:
        """A request comes: a conversation's first turn, or a recent one's next."""
        keys: list[BlockKey] = []
        if self._recent and self.draw.random() < 0.5:
            said = self.draw.choice(self._recent)
            keys = said[:] if len(said) + _MORE <= _MOST else []
        keys += fresh_keys(self.draw, _MORE if keys else _FIRST)
        self._come += 1
        request = self.rig.seen(f"request {self._come}", keys)
        return _Running(request, keys, last_step=self.draw.randint(*_DECODING))

    def _admit(self, one: _Running) -> bool:
        found = self.rig.lookup(one.request)
        if found is None:
            return False
        self._looked_up += len(one.keys)
        self._found += found // BLOCK_TOKENS
        one.table = self.rig.allocated(one.request, len(one.keys) + 1, found)
        self.rig.computed(one.table, one.keys)
        one.is_loading = found > 0
        self._running[one.request] = one
        return True

    def _age(self, begun: set[RequestId]) -> None:
        for one in [*self._running.values()]:
            one.steps += one.steps > 0 or one.request in begun
            if one.steps > one.last_step:
                del self._running[one.request]
                self.rig.ended(one.request, len(one.keys) * BLOCK_TOKENS, one.table)
                self._recent.append(one.keys)
                self._gone += 1


if __name__ == "__main__":
    asked, pool, assumed = json.loads(sys.argv[1])
    for reading in stream(asked, pool, Speeds(**assumed)):
        print(json.dumps(asdict(reading)), flush=True)
