"""One engine writes its memory while another one reads it, with the steps of both in every order.

The parts are the real ones, in real files. Before each of the reader's system calls, some of the owner's steps may run.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import pytest

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import open_folder
from kvoffload.model.ids import BlockKey, JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, NodeSlot, Tier
from kvoffload.node.folder import HostPlace
from kvoffload.node.neighbour import Neighbour, TableFile
from kvoffload.node.resets import NO_RESET, last_reset, note_reset, open_resets
from kvoffload.node.table import HostTable, NotATable, TableHeader
from kvoffload.testing import FakeDevice
from kvoffload.transfer.blocking_calls import Call
from kvoffload.transfer.host_file import HostFile, RankShape, open_host_file
from kvoffload.transfer.node import KindFolder, NodeMover, _Reader
from kvoffload.transfer.tier_jobs import TierPart
from tests.mutants.rules import undone
from tests.transfer.rig import ready_arena

PAGES = (64, 32)
CHUNK = 4
SLOT = SlotId(1)
BEFORE, AFTER = BlockKey(b"block that is there first"), BlockKey(b"another block, of later")
Program = Sequence[str]

OVERWRITES: Program = ("invalidate", "write 0", "write 1", "publish")
RESETS: Program = ("reset", "close", "write 0", "write 1")
RESETS_OF_ANOTHER: Program = ("reset",)
RESTARTS: Program = ("begin", "create", "write", "publish")
PROGRAMS = {
    "an owner that writes another block": OVERWRITES,
    "an owner that is reset, and goes on": RESETS,
    "another engine that is reset": RESETS_OF_ANOTHER,
    "a later owner, whose table has the same numbers": RESTARTS,
}


class NodeWorld:
    """An owner with two ranks, and the mover of one rank of another engine."""

    def __init__(self, root: Path, rank: int) -> None:
        self.rank = rank
        layout = FakeDevice(4, PAGES).layout
        place = HostPlace(root, "kind", "owner", lambda: KVIdentity("", "", "", {}))
        self.shapes = [RankShape(each, layout, CHUNK) for each in range(2)]
        self.files = [open_host_file(place.claim(), shape, CHUNK) for shape in self.shapes]
        self.claim = place.claim()
        self.memory = [file.take(0, file.shape.chunk_bytes(CHUNK)) for file in self.files]
        self.kind = open_folder(root / "kind")
        self._resets = open_resets(self.kind)
        self.arena = ready_arena(FakeDevice(4, PAGES), 3, CHUNK)
        self.mover = NodeMover(self.shapes[rank], self.arena)
        self.was_reset = False
        self.table: HostTable

    def restore(self) -> None:
        """Put the first block into its slot."""
        os.pwrite(self._resets, NO_RESET, 0)
        self.was_reset = False
        for rank, file in enumerate(self.files):
            self.identify(file, b"first" * 3 + bytes([rank]))
            self.write(rank, BEFORE)
        self.create()
        self.table.publish(SLOT, BEFORE, 0.0)

    def identify(self, file: HostFile, file_id: bytes) -> None:
        file.id = file_id
        file._has_begun = False
        file.begin()

    def create(self) -> None:
        reset = last_reset(self.kind)
        header = TableHeader(CHUNK, (self.files[0].id, self.files[1].id), "f" * 32, reset=reset)
        self.table = HostTable.create(self.claim.folder, header)

    def bytes_of(self, key: BlockKey) -> list[bytes]:
        return [bytes([key[0] + region]) * size for region, size in enumerate(PAGES)]

    def write(self, rank: int, key: BlockKey) -> None:
        start = 0
        for size, data in zip(PAGES, self.bytes_of(key), strict=True):
            ctypes.memmove(self.memory[rank] + start + SLOT * size, data, size)
            start += CHUNK * size

    def run(self, step: str) -> None:
        """Run one of the owner's steps."""
        word, _, rank = step.partition(" ")
        steps: dict[str, Callable[[], None]] = {
            "invalidate": lambda: self.table.invalidate(SLOT),
            "write": lambda: self.write_later(rank),
            "publish": lambda: self.table.publish(SLOT, AFTER, 0.0),
            "reset": self.reset,
            "close": lambda: self.table.close(),
            "begin": self.begin,
            "create": self.create,
        }
        steps[word]()

    def write_later(self, rank: str) -> None:
        for each in (int(rank),) if rank else (0, 1):
            self.write(each, AFTER)

    def reset(self) -> None:
        self.was_reset = True
        note_reset(self._resets)

    def begin(self) -> None:
        for number, file in enumerate(self.files):
            self.identify(file, b"later" * 3 + bytes([number]))

    def read(self, key: BlockKey) -> None:
        """Look for a block, copy it, and check what was copied."""
        target = self._find(key)
        if target is None:
            return
        was_reset = self.was_reset
        job = CopyJob(JobId(1), Direction.LOAD, Tier.NODE, (SlotId(2),), (target,), ())
        part = self.mover.get(
            TierPart(job, [0]), Call(lambda *_: None, None, lambda _: None, 0.0, 1.0), KindFolder(self.kind)
        )
        if part.whole:
            assert not was_reset, "a block from before a reset was fetched"
            assert [*map(bytes, self.arena.pages(2))] == self.bytes_of(key), "another block was fetched"

    def _find(self, key: BlockKey) -> NodeSlot | None:
        with suppress(NotATable), closing(Neighbour(TableFile.open(self.claim.folder))) as reader:
            if reader.follow() and key in reader.parts[key[0]]:
                name = self.claim.folder.path.name
                return NodeSlot(name, reader.table.header.generation, *reader.parts[key[0]][key])
        return None


@contextmanager
def interleaved(owner: Callable[[str], None], steps: Program, places: Sequence[int]) -> Iterator[list[int]]:
    """Run the owner's steps before those system calls of the reader that have the numbers in `places`."""
    counted, waiting = [0], [*zip(places, steps, strict=True)]

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: call(function, *args)

    def call(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        if not counted[0] < 0:
            number, counted[0] = counted[0], -1  # the owner's own calls are not counted
            while waiting and waiting[0][0] <= number:
                owner(waiting.pop(0)[1])
            counted[0] = number + 1
        return function(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counting(os.pread))
        patch.setattr(_Reader, "read", counting(_Reader.read))
        yield counted


def explore(root: Path, steps: Program, rank: int) -> str | None:
    """Try every order of the owner's steps and the reader's calls; return what went wrong first."""
    world = NodeWorld(root, rank)
    world.restore()
    with interleaved(world.run, (), ()) as counted:
        world.read(BEFORE)
    assert counted[0] >= 10, "the reader copies the block if nothing happens"
    orders = combinations_with_replacement(range(counted[0] + 1), len(steps))
    for places, key in product(orders, (BEFORE, AFTER)):
        world.restore()
        try:
            with interleaved(world.run, steps, places):
                world.read(key)
        except AssertionError as error:
            return f"{[*zip(places, steps, strict=True)]}: {error}"
    return None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_r21_in_no_order_is_another_block_fetched(shared_memory: Path, name: str, rank: int) -> None:
    assert explore(shared_memory, PROGRAMS[name], rank) is None


WRONG: dict[str, Program] = {
    "published before the last rank has written": ("invalidate", "write 0", "publish", "write 1"),
    "invalidated after the plan": ("write 0", "invalidate", "write 1", "publish"),
    "written before the file has its new id": ("write", "begin", "create", "publish"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_owner_with_the_steps_in_another_order_is_found(shared_memory: Path, name: str) -> None:
    problems = [explore(shared_memory / str(rank), WRONG[name], rank) for rank in range(2)]
    assert any(problem is not None for problem in problems)


SHOWN_BY = {
    "r21_no_second_look_at_the_number": OVERWRITES,
    "r21_no_second_look_at_the_owner": RESTARTS,
    "r21_generation_is_not_compared": RESTARTS,
    "r21_resets_of_others_do_not_count": RESETS_OF_ANOTHER,
}


@pytest.mark.parametrize("rule", SHOWN_BY)
def test_a_reader_without_a_part_of_the_rule_is_found(shared_memory: Path, rule: str) -> None:
    with undone(rule):
        assert explore(shared_memory, SHOWN_BY[rule], 0) is not None
