"""Measures the memory that Python needs per host slot, and the start-up time of an engine with many slots.

Each number of slots is measured in a separate process, by its resident memory before the scheduler side exists,
when all slots are full, and after every block was replaced twice: dicts with deletions need more memory and are
sometimes rebuilt. The memory includes the blocks' keys, which have no other owner after their request has ended.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvoffload.cli.exits import CommandError
from tests.bench.engineless import Engineless
from tests.bench.lines import Line, line

_TARGETS_AT = 1_000_000  # the number of slots to which the targets apply
_REPLACED = 2  # in the first round dicts grow, and in the second Python rebuilds them
_ROOT = Path(__file__).resolve().parents[2]
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(NamedTuple):
    """The result for one number of slots.

    Args:
        start_s: the seconds until all slots are ready.
        full: the resident bytes per slot when all slots are full.
        churned: the resident bytes per slot after each block was replaced twice.
        longest_put_s: the longest processor time for storing 64 blocks, in seconds.
    """

    start_s: float
    full: float
    churned: float
    longest_put_s: float


def measure(slots: Sequence[int]) -> Iterator[Line]:
    """Measure each number of slots in a separate process.

    Raises:
        CommandError: a process failed, for example because it ran out of memory.
    """
    for count in slots:
        found, what = _in_a_process(count), f", {count:,} slots"
        most_bytes, most_s = (300, 2) if count == _TARGETS_AT else (None, None)
        yield line(f"a slot's memory, full{what}", [found.full], " B", at_most=most_bytes)
        what_churned = f"a slot's memory, every block replaced twice{what}"
        yield line(what_churned, [found.churned], " B", at_most=most_bytes)
        yield line(f"start-up{what}", [found.start_s], " s", at_most=most_s)
        yield line(
            f"longest pause while blocks take others' places{what}", [1e3 * found.longest_put_s], " ms"
        )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def fill(slots: int) -> Memory:
    """Measure in this process, which must be new: reused memory would hide the growth."""
    draw = random.Random(0)
    Engineless(16).put([])  # import all modules, and create the objects that all scheduler sides share
    gc.collect()
    gc.disable()  # idle engines run no garbage collection
    before = resident_bytes()
    begun = time.perf_counter()
    rig = Engineless(slots)
    start_s = time.perf_counter() - begun
    read: list[int] = []
    longest: list[float] = []
    for rounds in (1, _REPLACED):
        longest += [rig.fill(draw, slots) for _ in range(rounds)]
        read.append(resident_bytes())
    assert rig.side.gauges()["kvoffload_slots"]["host", "ready"] == slots
    full, churned = ((each - before) / slots for each in read)
    return Memory(start_s, full, churned, max(longest))


def _in_a_process(slots: int) -> Memory:
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(_ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(slots)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CommandError(f"the process with {slots:,} slots ended with {done.returncode} and no answer")
    return Memory(*json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(fill(int(sys.argv[1]))))
