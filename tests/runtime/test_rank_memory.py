"""Opening the host memory of a rank, alone or shared with others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError
from kvoffload.model.ids import Rank
from kvoffload.node.folder import HostPlace, list_kept
from kvoffload.runtime import rank_memory
from kvoffload.runtime.rank_memory import RankMemory, Ranks, open_memory
from kvoffload.testing import FakeDevice
from kvoffload.transfer.host_memory import RESERVE, slots_for
from kvoffload.transfer.sharing import Sharing

LAYOUT = FakeDevice(8, pages=[64, 32]).layout
OpenMemory = Callable[..., RankMemory]


@pytest.fixture
def opened() -> Iterator[OpenMemory]:
    life, made = uuid4().hex, list[RankMemory]()

    def open_one(
        rank: int, *, ranks: int = 4, sharers: int = 2, local: int = 4, slots: int = 10, **options: object
    ) -> RankMemory:
        config = OffloadConfig(host_bytes=ranks // sharers * slots * LAYOUT.slot_bytes)
        place = options.get("place")
        assert place is None or isinstance(place, HostPlace)
        layout = options.get("layout", LAYOUT)
        who = Ranks(Rank(rank), ranks, local, Sharing(sharers, life))
        made.append(open_memory(config, who, layout, place))  # type: ignore[arg-type]
        return made[-1]

    yield open_one
    for memory in made:
        memory.close(keeps=True, may_still_write=False)


def test_ranks_of_two_stages_share_two_files(opened: OpenMemory) -> None:
    files = [opened(rank).file for rank in range(4)]
    assert {file.slots for file in files if file} == {10}
    ids = [file.id for file in files if file]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_a_rank_alone_has_anonymous_memory(opened: OpenMemory) -> None:
    assert opened(3, sharers=1).file is None


def test_a_rank_that_gets_no_memory_says_from_whom(
    opened: OpenMemory, monkeypatch: pytest.MonkeyPatch, shared_memory: Path
) -> None:
    monkeypatch.setattr(rank_memory, "_WAIT_S", 0.0)
    message = r"host_share: rank 3 gets no host memory from rank 2, .*: nothing was offered for 0 s.* set host_share to false"
    with pytest.raises(ConfigError, match=message):
        opened(3)
    place = HostPlace(shared_memory, "kind", "life", lambda: pytest.fail("no identity is needed"))
    with pytest.raises(ConfigError, match=message):
        opened(3, place=place)
    (kept,) = list_kept(shared_memory)
    assert kept.is_orphan  # the rank has left the folder
    assert kept.owner.processes == ()


def test_a_rank_with_another_layout_is_refused(opened: OpenMemory) -> None:
    opened(0)
    with pytest.raises(ConfigError, match="host_share: this rank's KV cache has another layout"):
        opened(1, layout=FakeDevice(8, pages=[32, 64]).layout)


@pytest.mark.parametrize(("sharers", "fits"), [(1, False), (2, True)])
def test_shared_memory_is_counted_once_for_each_copy_on_the_machine(
    opened: OpenMemory, sharers: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = 2**20
    left = f"MemAvailable: {(RESERVE + 3 * slots * LAYOUT.slot_bytes) // 1024} kB\n"
    monkeypatch.setattr(rank_memory, "slots_for", partial(slots_for, read={"/proc/meminfo": left}.get))
    if fits:
        assert opened(0, sharers=sharers, slots=slots).slots == slots
    else:
        with pytest.raises(ConfigError, match="all 4 ranks of this machine"):
            opened(0, sharers=sharers, slots=slots)


def test_memory_that_a_stopped_engine_has_left_counts_as_free(
    opened: OpenMemory, monkeypatch: pytest.MonkeyPatch, shared_memory: Path
) -> None:
    """A start whose files are there needs no new memory."""
    slots = 2**18
    size = slots * LAYOUT.slot_bytes

    def place() -> HostPlace:
        return HostPlace(shared_memory, "kind", uuid4().hex, lambda: pytest.fail("no identity is needed"))

    first = opened(0, ranks=1, sharers=1, local=1, slots=slots, place=place())
    assert first.file is not None
    os.posix_fallocate(first.file.files[0], 0, size)
    first.close(keeps=True, may_still_write=False)
    left = f"MemAvailable: {(RESERVE + size // 2) // 1024} kB\n"
    monkeypatch.setattr(rank_memory, "slots_for", partial(slots_for, read={"/proc/meminfo": left}.get))
    assert opened(0, ranks=1, sharers=1, local=1, slots=slots, place=place()).slots == slots
