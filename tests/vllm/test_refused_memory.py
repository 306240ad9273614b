"""Tests a stock vLLM that is refused host memory while its arena grows.

    python -m tests.vllm.test_refused_memory FOLDER

This command runs two engines, one after the other. When an engine's arena begins to grow, the process's address
space is limited (`RLIMIT_AS`), so that the kernel refuses a chunk. The limit is removed when the engine has ended.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from kvoffload.transfer.arena import Arena
from tests.vllm.engine_rig import (
    MARKS,
    SLOT_BYTES,
    Asked,
    Rig,
    check_same,
    offloading,
    prompt,
    truths,
)
from tests.vllm.programs import run_module

pytestmark = MARKS

# A chunk is larger than by default, so that vLLM's own allocations are smaller than a chunk.
CHUNK_BYTES = 256 * 2**20
CHUNKS = 4  # the number of chunks that the arena requests
CHUNK_SLOTS = CHUNK_BYTES // SLOT_BYTES
GRANTED = (0, 1)  # for each engine, the number of chunks that the limit allows
_ROOM_BYTES = CHUNK_BYTES // 2  # how much address space the limit leaves for vLLM's own allocations


def test_an_engine_runs_with_less_host_memory_than_requested(folder: Path) -> None:
    # Limit malloc's arenas, because each reserves 64 MiB of address space.
    log = run_module(__name__, folder, environment={"MALLOC_ARENA_MAX": "2"})
    lines = [line for line in log.splitlines() if "host_memory_refused" in line]
    for granted, line in zip(GRANTED, lines, strict=True):
        # Without any slot, nothing can be offloaded, so the line is an error.
        assert ("WARNING" if granted else "ERROR") in line
        assert f" ready_slots={granted * CHUNK_SLOTS} " in line
        assert f"wanted_slots={CHUNKS * CHUNK_SLOTS} " in line
        assert "Cannot allocate memory" in line


@contextmanager
def limited(granted: int) -> Iterator[None]:
    """During the `with` block, limit the address space when the arena begins to grow, so that the arena gets
    `granted` chunks.
    """
    prepare, before = Arena.prepare, resource.getrlimit(resource.RLIMIT_AS)

    async def prepare_within(arena: Arena, **settings: bool) -> None:
        limit = address_space() + granted * CHUNK_BYTES + _ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        await prepare(arena, **settings)

    try:
        chunks = patch.object(Arena.__init__, "__kwdefaults__", {"chunk_bytes": CHUNK_BYTES, "clock": None})
        with chunks, patch.object(Arena, "prepare", prepare_within):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def check_served(rig: Rig, granted: int) -> None:
    """Serve prompts, then serve them again with an empty device cache."""
    asked = {f"r{length}": Asked(prompt(length, length)) for length in (300, 200, 100)}
    rig.until(lambda: rig.pump._arena.refusal is not None)
    expected = truths(rig, asked)
    before = rig.counts
    check_same(rig.run(asked), expected)
    assert rig.scheduler.reset_prefix_cache()
    answers = rig.run(asked)
    check_same(answers, expected)
    assert [bool(one.cached) for one in answers.values()] == [granted > 0] * len(asked)
    rig.check_clean()
    gained = rig.counts.minus(before)
    assert (gained.count("kvoffload_load_blocks_total", "loaded") > 0) is (granted > 0)
    assert (gained.count("kvoffload_store_blocks_total", "host_full") > 0) is (granted == 0)
    capacity = rig.side.gauges()["kvoffload_capacity_slots"]["host",]
    assert capacity == rig.side.core.state.pool.capacity == granted * CHUNK_SLOTS
    assert rig.side.degraded is None


def main(folder: Path) -> None:
    for granted in GRANTED:
        with limited(granted), offloading("qwen3", folder, CHUNKS * CHUNK_SLOTS) as rig:
            check_served(rig, granted)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
