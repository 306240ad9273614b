"""Measures how long it takes to pin memory, and how long driver calls wait meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from kvoffload.gpu_check.parts import Line, Options, asked, in_words, measured
from kvoffload.gpu_check.rig import Rig, code_of

_SECONDS = 2.0
_PINNED_MIB: tuple[int, ...] = (0, 16, 64, 256)
_ARENA_MIB = 64  # MiB that the arena pins in one call while an engine serves requests
_LONGEST_MS = 5.0
_PAGE = 4096
# Expected error codes: the driver refuses to register or to release the same memory a second time.
_CODES = "0 712 712 0 713"


def latencies(options: Options) -> Iterator[Line]:
    """Yield how long it takes to pin memory, and how long driver calls wait meanwhile."""
    rig = Rig(options)
    yield from asked("pinning", _pinning(rig))
    for mib in _PINNED_MIB:
        yield from asked(f"calls while pieces of {mib} MiB are pinned", _beside_pinning(rig, mib))


@contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """Repeat `work` on another thread until the `with` block ends or raises an exception."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            stop.set()
        repeating.result()


def _pinning(rig: Rig) -> Iterator[Line]:
    driver = rig.driver
    memory = rig.host_memory(_ARENA_MIB << 20)
    at, size = memory.address, memory.size
    begun = time.perf_counter()
    driver.register(at, size)
    yield measured(
        f"pinning {_ARENA_MIB} MiB of touched memory", [1e3 * (time.perf_counter() - begun)], " ms"
    )
    driver.unregister(at)
    calls = [partial(driver.register, at, size), partial(driver.register, at, size)]
    calls += [partial(driver.register, at + _PAGE, _PAGE), *[partial(driver.unregister, at)] * 2]
    codes = " ".join(str(code_of(call)) for call in calls)
    what = "codes of pinning memory, pinning it again, pinning a page of it, releasing it, releasing it again"
    yield in_words(what, codes, _CODES)


def _beside_pinning(rig: Rig, mib: int) -> Iterator[Line]:
    """Measure how long it takes to record and query an event while memory is being pinned.

    An engine's kernel launches wait for the same locks in the driver.
    """
    memory = rig.host_memory(mib << 20) if mib else None

    def pin() -> None:
        if memory is None:
            time.sleep(1e-3)
        else:
            rig.driver.register(memory.address, memory.size)
            rig.driver.unregister(memory.address)

    calls: dict[str, Callable[[], object]] = {
        "recording": lambda: rig.driver.record(rig.event, rig.stream),
        "querying": lambda: rig.driver.has_passed(rig.event),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    with repeated(pin):
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end:
            for name, call in calls.items():
                begun = time.perf_counter()
                call()
                found[name].append(1e3 * (time.perf_counter() - begun))
            time.sleep(1e-4)
    where = f"while pieces of {mib} MiB are pinned" if mib else "alone"
    for name, times in found.items():
        yield measured(f"{name} an event {where}", times, " ms")
        goal = _LONGEST_MS if mib == _ARENA_MIB else None
        yield measured(
            f"{name} an event {where}, the longest of {len(times):,}", [max(times)], " ms", at_most=goal
        )
