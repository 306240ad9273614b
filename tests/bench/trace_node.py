"""Counts what engines of one machine find in a trace, depending on what becomes of blocks that they fetch from each other.

A fetched block passes through the host memory of the engine that needs it, and then it is on two hosts. Such blocks are
*kept* like the engine's own blocks, put at the *cold end* of the order of eviction when the request has ended, or
*dropped* then. At last, they are put at the cold end, and the engine that has stored them counts the use. No engine can
do that: it does not know who reads its memory. The figures say what that would be worth.

The hosts of all engines together are as large as a multiple of the live set: the blocks that have been used and will be
used again, on average. Engines take requests in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kvoffload.model.ids import SlotId
from tests.bench.lines import Line
from tests.bench.trace import CoreEngine, Tiers
from tests.bench.trace_file import Trace, read_trace
from tests.bench.workloads import WORKLOADS, draw_workload, live_blocks

ENGINES = (2, 4, 8)
HOSTS = (0.5, 1.0, 2.0)
_REQUESTS = 6000  # of a drawn workload

Leave = Callable[[CoreEngine, Sequence[SlotId]], object]


class Found(NamedTuple):
    """Shares of all prompt tokens.

    Args:
        hit: tokens that need not be computed.
        read: tokens that engines have read from each other.
    """

    hit: float
    read: float


def _keep(engine: CoreEngine, slots: Sequence[SlotId]) -> None:
    pass


def _to_cold_end(engine: CoreEngine, slots: Sequence[SlotId]) -> None:
    engine.pool.leave_early(slots[::-1])


def _drop(engine: CoreEngine, slots: Sequence[SlotId]) -> None:
    for slot in slots:
        engine.pool.invalidate(slot)


def _use_on_others(engine: CoreEngine, slots: Sequence[SlotId]) -> None:
    keys = [key for slot in reversed(slots) if (key := engine.pool.indexed_key(slot)) is not None]
    for other in engine.machine:
        if other is not engine:
            pool = other.pool
            pool.use([pool.index[key] for key in keys if key in pool.index])
    _to_cold_end(engine, slots)


WAYS: dict[str, Leave] = {
    "kept": _keep,
    "cold end": _to_cold_end,
    "dropped": _drop,
    "cold end, owner counts the use": _use_on_others,
}


def replay(trace: Trace, engines: int, slots: int, leave: Leave, *, node: bool = True) -> Found:
    """Run a trace's requests in turn on engines with so many host slots each.

    Args:
        trace: the trace.
        engines: how many engines the machine has.
        slots: the host slots of each engine.
        leave: what becomes of the slots of fetched blocks, heads first, when a request has ended.
        node: whether the engines read each other's memory.
    """
    machine: list[CoreEngine] = []
    for _ in range(engines):
        machine.append(CoreEngine(Tiers("", slots, node=node), set(), trace.block_tokens, machine))
    for number, prompt in enumerate(trace.prompts):
        engine = machine[number % engines]
        engine.serve(prompt)
        index, fetched = engine.pool.index, engine.fetched
        leave(engine, [index[key] for key in prompt.keys if key in fetched and key in index])
    tokens, hit, read = [sum(engine.count[name] for engine in machine) for name in ("tokens", "hit", "read")]
    return Found(hit / tokens, read * trace.block_tokens / tokens)


def measure(path: Path | None) -> Iterator[Line]:
    """Measure each way on the trace in a file, or on drawn workloads."""
    if path is None:
        traces = {name: draw_workload(name, _REQUESTS) for name in WORKLOADS}
    else:
        traces = {path.stem: read_trace(path)}
    for (name, trace), engines, host in product(traces.items(), ENGINES, HOSTS):
        slots = max(int(host * live_blocks(trace.prompts) / engines), 1)
        what = f"{name}, {engines} engines, host {host:g}"
        yield Line(f"{what}, alone", 100 * replay(trace, engines, slots, _keep, node=False).hit, unit=" %")
        for way, leave in WAYS.items():
            found = replay(trace, engines, slots, leave)
            yield Line(f"{what}, {way}", 100 * found.hit, unit=" %")
            yield Line(f"{what}, {way}: read from each other", 100 * found.read, unit=" %")
