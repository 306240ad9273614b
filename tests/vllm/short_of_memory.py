"""Runs a stock vLLM in a process whose address space is limited while the host arena grows.

    python -m tests.vllm.short_of_memory FOLDER

The limit (`RLIMIT_AS`) is set when the arena begins to grow, so that the kernel refuses a chunk. The limit is
removed when the engine has ended. The program writes the engines' results to `FOLDER/told.json`, and its log
to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvoffload.core.machine import SlotState
from kvoffload.transfer.arena import Arena
from tests.vllm.engine_rig import SLOT_BYTES, Asked, Reported, Rig, offloading

# A chunk is larger than by default, so that vLLM's own allocations are smaller than a chunk.
CHUNK_BYTES = 256 * 2**20
PIECES = 4  # the number of chunks that the arena requests
PIECE_SLOTS = CHUNK_BYTES // SLOT_BYTES
GRANTED = (0, 1)  # for each engine, the number of chunks that the limit allows
_ROOM_BYTES = CHUNK_BYTES // 2  # how much address space the limit leaves for vLLM's own allocations


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


def is_refused(rig: Rig) -> bool:
    return rig.pump._arena.refusal is not None


def prompts() -> dict[str, Asked]:
    random_ = random.Random(1)
    drawn = [tuple(random_.randrange(256) for _ in range(length)) for length in (300, 200, 100)]
    return {f"p{number}": Asked(prompt) for number, prompt in enumerate(drawn)}


def serve(rig: Rig) -> dict[str, Any]:
    """Serve prompts, then serve them again with an empty device cache. Return the answers and counts."""
    asked = prompts()
    truth = rig.run({f"t{name}": dataclasses.replace(one, salt="truth") for name, one in asked.items()})
    first = rig.run(asked)
    assert rig.scheduler.reset_prefix_cache()
    again = rig.run({f"a{name}": one for name, one in asked.items()})
    rig.check_clean()
    counts = rig.counts
    return {
        "truth": _plain(truth),
        "first": _plain(first),
        "again": _plain(again),
        "capacity": rig.side.core.state.pool.capacity,
        "gauge": rig.side.gauges()["kvoffload_capacity_slots"]["host",],
        "quarantined": rig.slots(SlotState.QUARANTINED),
        "loaded": counts.count("kvoffload_load_blocks_total", "loaded"),
        "host_full": counts.count("kvoffload_store_blocks_total", "host_full"),
        "degraded": rig.side.degraded,
    }


def main(folder: Path) -> None:
    reported = []
    for granted in GRANTED:
        with limited(granted), offloading("qwen3", folder, PIECES * PIECE_SLOTS) as rig:
            rig.until(partial(is_refused, rig))
            reported.append(serve(rig))
    (folder / "told.json").write_text(json.dumps(reported))


def _plain(reported: dict[str, Reported]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in reported.values()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
