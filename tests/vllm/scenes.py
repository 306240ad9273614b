"""Scenes in which requests load blocks from the host: reload, mixed traffic, preemption, aborts, a reset, and failed
loads.

One engine plays every scene. Its answers must equal those of requests that find no block. As a control, loads lie: they
report success and leave zeros, which must change the answers.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvoffload.core.jobs import Load
from kvoffload.core.loads import Loads
from kvoffload.core.planners import LazyPlanner
from kvoffload.model.groups import AttentionKind
from kvoffload.model.wire import Direction
from kvoffload.testing import GatedCopier
from kvoffload.testing.copier import GatedTicket
from tests.vllm.engine_rig import DEVICE_BLOCKS, Asked, Held, Reported, Rig, offloading, same
from tests.vllm.stock import checkpoints

BLOCK_TOKENS: Mapping[checkpoints.Kind, int] = {
    "qwen3": 32,
    "gemma3": 32,
    "lfm2": 32,
    "granite4": 64,
    "qwen3_next": 64,
}


class Steered(GatedCopier):
    """Copies immediately. With `fails`, loads fail. With `lies`, they report success and leave zeros: in the states of
    a model with recurrent layers, or otherwise in every loaded block. With `lies_in`, they lie only in these memory
    regions.
    """

    def __init__(self) -> None:
        super().__init__(held=False)
        self.rig: Rig | None = None
        self.fails = False
        self.lies = False
        self.lies_in: Collection[int] | None = None

    def submit(self, direction: Direction, runs: Any, fences: Sequence[Any]) -> GatedTicket:
        if direction is Direction.LOAD and self.fails:
            self.hold()
            ticket = super().submit(direction, runs, fences)
            ticket.fail()
            self._held = False
            return ticket
        ticket = super().submit(direction, runs, fences)
        if direction is Direction.LOAD and self.lies:
            assert self.rig is not None
            for address, size in _loaded_pages(self.rig, self.lies_in):
                ctypes.memset(address, 0, size)
        return ticket


def _loaded_pages(rig: Rig, regions: Collection[int] | None) -> Iterator[tuple[int, int]]:
    """Yield the address and the size of each page that an open load has filled and `Steered` may overwrite."""
    groups = dict(zip(rig.connector._groups, rig.side.shape.groups, strict=True))
    recurrent = [number for number, group in groups.items() if group.kind is AttentionKind.RECURRENT]
    suffixes = {number.to_bytes(4, "big") for number in recurrent or groups}
    state = rig.side.core.state
    for job in [job for job in state.jobs.open.values() if isinstance(job, Load)]:
        for slot, block in zip(job.slots, job.targets, strict=True):
            key = state.pool.key(slot)
            if key is not None and key[-4:] in suffixes:
                for number, region in enumerate(rig.pump._arena.layout.regions):
                    if regions is not None and number not in regions:
                        continue
                    yield region.address + block * region.block_stride, region.page_bytes


@dataclass
class Stage:
    """An engine whose copies a test controls, and the answers of requests that find no block."""

    kind: checkpoints.Kind
    rig: Rig
    requests: Mapping[str, Asked]
    expected: Mapping[str, Reported]
    copier: Steered = field(default_factory=Steered)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def forget_on_device(self) -> None:
        """Finish all requests, then empty the device's cache, but not the host's.

        With the lazy policy, blocks are stored only when other blocks displace them, so other prompts first
        fill the device.
        """
        self.rig.finish()
        if isinstance(self.rig.side.core._planner, LazyPlanner):
            length = 14 * BLOCK_TOKENS[self.kind]
            count = DEVICE_BLOCKS[self.kind] // 14 + 1
            texts = [tuple(self.draw.choices(range(256), k=length)) for _ in range(count)]
            self.rig.run({f"f{number}": Asked(text, 1) for number, text in enumerate(texts)})
        assert self.rig.scheduler.reset_prefix_cache()

    def put_on_host(self) -> None:
        """Store the blocks of all requests on the host, and remove them from the device."""
        self.rig.forget()
        self.rig.run(self.requests)
        self.forget_on_device()

    def different(self, answers: Mapping[str, Reported]) -> list[str]:
        """Return the names of requests whose answers differ from the expected ones."""
        return [name for name, answer in answers.items() if not same(answer, self.expected[name])]

    def check_that_lies_are_noticed(self, scene: Scene) -> None:
        self.copier.lies = True
        assert self.different(scene(self))
        self.copier.lies = False
        self.rig.finish()
        self.rig.forget()  # removes blocks that were computed from zeros


def requests_for(kind: checkpoints.Kind, seed: int = 5) -> dict[str, Asked]:
    """Return prompts. Some begin with the same whole blocks, and some continue another prompt."""
    draw, block = random.Random(seed), BLOCK_TOKENS[kind]
    stems = [[draw.randrange(256) for _ in range(6 * block)] for _ in range(2)]
    asked: dict[str, Asked] = {}
    # fewer requests, because our ops for gated delta nets are slow
    for number in range(10 if kind == "qwen3_next" else 14):
        kept = draw.choice((1, 2, 3, 4, 5, 6)) * block
        tail = [draw.randrange(256) for _ in range(draw.randrange(1, 2 * block))]
        asked[f"r{number}"] = Asked(tuple(stems[number % 2][:kept] + tail), draw.randrange(4, 24))
        if number % 4 == 3:  # the next turn of a conversation
            before = asked[f"r{number - 1}"].prompt
            asked[f"r{number}"] = Asked(before + tuple(tail), 8)
    return asked


def without_cache(rig: Rig, asked: Mapping[str, Asked]) -> dict[str, Reported]:
    """Return the engine's answers without reading a prefix cache."""
    for name, one in asked.items():
        rig.ask(f"c{name}", one, skip_reading_prefix_cache=True)
    rig.finish()
    assert not any(rig.reported[f"c{name}"].cached for name in asked)
    return {name: rig.reported[f"c{name}"] for name in asked}


@contextmanager
def stage(
    kind: checkpoints.Kind,
    folder: Path,
    host_blocks: int = 512,
    *,
    asked: Mapping[str, Asked] | None = None,
    expected: Mapping[str, Reported] | None = None,
    **options: Any,
) -> Iterator[Stage]:
    """Run an engine for scenes during the `with` block. Without `expected`, it also computes these answers."""
    copier = Steered()
    with offloading(kind, folder, host_blocks, held=Held(copier=copier), **options) as rig:
        copier.rig = rig
        asked = asked or requests_for(kind)
        expected = expected or without_cache(rig, asked)
        rig.forget()
        yield Stage(kind, rig, asked, expected, copier)


# -- scenes: each returns answers that were made with blocks from the host ---------------------------------------------

Scene = Callable[[Stage], dict[str, Reported]]


def reloaded(on: Stage) -> dict[str, Reported]:
    on.put_on_host()
    return on.rig.run(on.requests)


def mixed(on: Stage) -> dict[str, Reported]:
    """Send requests in three waves, some while others run. They need all of the device's blocks."""
    on.rig.forget()
    answers: dict[str, Reported] = {}
    names = list(on.requests)
    for wave in range(3):
        chosen = random.Random(wave).sample(names, len(names) // 2)
        for number, name in enumerate(chosen):
            on.rig.ask(name, on.requests[name])
            if number % 2:
                on.rig.step()
        on.rig.finish()
        answers |= {name: on.rig.reported[name] for name in chosen}
    on.forget_on_device()
    return answers | on.rig.run(on.requests)


def preempted(on: Stage) -> dict[str, Reported]:
    """Generate longer answers, so that vLLM preempts requests. Return the answers cut to their normal length."""
    on.put_on_host()
    longer = {name: Asked(one.prompt, 2 * BLOCK_TOKENS[on.kind]) for name, one in on.requests.items()}
    with on.rig.expect_preemption():
        answers = on.rig.run(longer)
    return {
        name: Reported(one.tokens[:count], one.logprobs[:count], (), one.cached, one.finished)
        for name, one in answers.items()
        for count in [on.requests[name].count]
    }


def aborted(on: Stage) -> dict[str, Reported]:
    """Abort some requests during their loads and others while they run. Return all other answers."""
    on.put_on_host()
    names = list(on.requests)
    on.rig.reported.clear()
    for name in names:
        on.rig.ask(name, on.requests[name])
    on.rig.step()
    on.rig.abort(names[1], names[4])
    for _ in range(4):
        on.rig.step()
    on.rig.abort(names[2], names[7])
    on.rig.finish()
    gone = {names[number] for number in (1, 2, 4, 7)}
    return {name: answer for name, answer in on.rig.reported.items() if name not in gone}


def reset(on: Stage) -> dict[str, Reported]:
    """Reset, and check that no earlier block is found. Return the answers of requests that load later blocks."""
    on.put_on_host()
    assert on.rig.connector.reset_cache()
    before, longest = on.rig.counts, max(on.requests, key=lambda name: len(on.requests[name].prompt))
    assert on.rig.run({longest: on.requests[longest]})[longest].cached == 0
    assert on.rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") == 0
    on.rig.run(on.requests)
    on.forget_on_device()
    return on.rig.run(on.requests)


def failed(on: Stage) -> dict[str, Reported]:
    """Let every load fail, so that the engine computes the tokens again."""
    on.put_on_host()
    on.copier.fails = True
    answers = on.rig.run(on.requests)
    on.copier.fails = False
    return answers


def failed_without_copies(on: Stage) -> dict[str, Reported]:
    """Let every load fail before a worker has a part in it, so that the engine computes the tokens again."""
    on.put_on_host()
    with mock.patch.object(Loads, "_copies", return_value=None):
        return on.rig.run(on.requests)


SCENES: Sequence[Scene] = (reloaded, mixed, preempted, aborted, reset)


# -- shared prefixes ---------------------------------------------------------------------------------------------------

SHARED_BLOCKS = 6


def shared_prefix(on: Stage, count: int, seed: int) -> list[Asked]:
    draw = random.Random(seed)
    block = BLOCK_TOKENS[on.kind]
    prefix = [draw.randrange(256) for _ in range(SHARED_BLOCKS * block)]
    return [
        Asked(tuple(prefix + [draw.randrange(256) for _ in range(2 * block + 5)]), 4) for _ in range(count)
    ]


def found_one_by_one(on: Stage, asked: Sequence[Asked]) -> list[int]:
    """Serve the requests one by one, each with an empty device cache. Return how many tokens each request
    finds.
    """
    found = []
    for number, one in enumerate(asked):
        on.forget_on_device()
        found.append(on.rig.run({f"j{number}": one})[f"j{number}"].cached)
    return found
