from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.testing import FakeClock
from kvoffload.transfer.host_copier import (
    HostCopier,
    HostTicket,
    WatchfulCopy,
    choose_copy,
    copy_by_memmove,
    cut,
)
from kvoffload.transfer.ports import Threads, TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.gates import ManualExecutor, ThreadGate

LOAD, STORE = Direction.LOAD, Direction.STORE


def runs_of(*sizes: int, start: int = 0) -> CopyRuns:
    size = np.array(sizes, np.int64)
    source = start + np.cumsum(size) - size
    return CopyRuns(source, source + 10**6, size)


class Copied:
    """Records which addresses were copied, in which order, and by which thread."""

    def __init__(self, before: Callable[[CopyRuns], None] = lambda runs: None) -> None:
        self.starts: list[int] = []
        self.threads: set[int] = set()
        self._before = before

    def __call__(self, runs: CopyRuns) -> None:
        self._before(runs)
        self.threads.add(threading.get_ident())
        self.starts.append(int(runs.source[0]))


class Queue(HostCopier):
    def add(self, direction: Direction, runs: CopyRuns) -> HostTicket:
        return self.submit(direction, runs, ())


def queue_with(executor: Threads, copy: Callable[[CopyRuns], None], clock: FakeClock | None = None) -> Queue:
    return Queue(executor, clock or FakeClock(), copy, piece_bytes=10)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 40))
def test_property_pieces_cover_the_batch_in_order_and_are_short(sizes: list[int], limit: int) -> None:
    whole = runs_of(*sizes)
    parts = list(cut(whole, limit))
    assert all(0 < part.total_bytes < 2 * limit or len(parts) == 1 for part in parts)
    starts, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "size"))
    assert (starts[0], starts[-1] + lengths[-1]) == (0, whole.total_bytes)
    assert (starts[1:] == starts[:-1] + lengths[:-1]).all()
    assert all(((part.target - part.source) == 10**6).all() for part in parts)


def test_a_later_load_is_copied_before_the_rest_of_a_store() -> None:
    executor, loads = ManualExecutor(), list[HostTicket]()

    def arrive(runs: CopyRuns) -> None:
        if not loads:  # this branch runs while the store's first piece is copied
            loads.append(queue.add(LOAD, runs_of(10, 10, start=500)))

    copied = Copied(arrive)
    queue = queue_with(executor, copied)
    store = queue.add(STORE, runs_of(10, 10, 10))
    executor.run_next()
    assert copied.starts == [0, 500, 510, 10, 20]
    assert {store.query(), loads[0].query()} == {TicketState.DONE}
    executor.run_all()  # the remaining calls find no pieces
    assert len(copied.starts) == 5


def test_stores_leave_one_thread_free_for_loads() -> None:
    gate = ThreadGate()

    def before(runs: CopyRuns) -> None:
        if runs.source[0] < 500:
            gate.arrive()

    executor, copied = DaemonExecutor("test", 2), Copied(before)
    queue = queue_with(executor, copied)
    stores = [queue.add(STORE, runs_of(10, 10, start=start)) for start in (0, 100)]
    gate.wait_for_arrivals(1)
    load = queue.add(LOAD, runs_of(10, 10, start=500))
    executor.submit(lambda: None).result(30)  # this call ends after the load's calls, on the only free thread
    assert load.query() is TicketState.DONE
    assert [store.query() for store in stores] == [TicketState.PENDING] * 2
    gate.open()
    executor.shutdown()
    wait_until(lambda: all(store.query() is TicketState.DONE for store in stores))
    assert copied.starts == [500, 510, 0, 10, 100, 110]


def test_one_batch_of_loads_is_copied_by_several_threads() -> None:
    gate, executor = ThreadGate(), DaemonExecutor("test", 3)
    copied = Copied(lambda runs: gate.arrive())
    ticket = queue_with(executor, copied).add(LOAD, runs_of(*[10] * 8))
    gate.wait_for_arrivals(2)
    executor.submit(lambda: None).result(30)  # this call shows that the third thread is free
    gate.open()
    wait_until(lambda: ticket.query() is TicketState.DONE)
    executor.shutdown()
    assert len(copied.threads) == 2
    assert sorted(copied.starts) == list(range(0, 80, 10))


def test_a_batch_fails_only_after_its_last_piece_has_ended() -> None:
    executor, states = ManualExecutor(), list[TicketState]()

    def copy(runs: CopyRuns) -> None:
        states.append(ticket.query())
        if runs.source[0] == 0:
            raise OSError("torn")

    ticket = queue_with(executor, copy).add(LOAD, runs_of(10, 10))
    executor.run_all()
    assert states == [TicketState.PENDING] * 2  # the second piece follows although the first one failed
    with pytest.raises(OSError, match="torn"):
        ticket.query()


def test_a_batchs_duration_is_from_its_first_start_to_its_last_end() -> None:
    clock, executor = FakeClock(), ManualExecutor()
    queue = queue_with(executor, lambda runs: clock.jump(0.5), clock)
    ticket = queue.add(STORE, runs_of(10, 10))
    clock.jump(3.0)
    assert ticket.copy_seconds is None
    executor.run_next()
    assert ticket.copy_seconds == 1.0


def test_a_copy_without_a_thread_is_not_started() -> None:
    executor = ManualExecutor()
    queue = queue_with(executor, Copied())
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        queue.add(STORE, runs_of(10, 10))
    assert not queue._stores


def test_a_piece_that_a_thread_has_taken_is_copied_during_shutdown() -> None:
    class Refuses(ManualExecutor):
        def submit(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            if queue._loads:
                queue._serve()  # this stands for a thread that is still running
            raise RuntimeError("shut down")

    copied = Copied()
    queue = queue_with(Refuses(), copied)
    assert queue.add(LOAD, runs_of(10, 10)).query() is TicketState.DONE
    assert sorted(copied.starts) == [0, 10]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns True, or until the test's time limit."""
    while not holds():
        threading.Event().wait(0.001)


# -- how a piece is copied -----------------------------------------------------------------------------------------


def test_the_quick_copy_is_used_except_after_it_took_several_times_as_long() -> None:
    clock, ways = FakeClock(), list[str]()
    milliseconds = iter([1, 1.5, 9, 9, 9, 1.2, 1, 9, 1])

    def way(name: str) -> Callable[[CopyRuns], None]:
        def copy(runs: CopyRuns) -> None:
            ways.append(name)
            clock.jump(next(milliseconds) / 1000)

        return copy

    copy = WatchfulCopy(way("q"), way("p"), clock.monotonic)

    def runs(size: int) -> CopyRuns:
        return CopyRuns(*(np.array([part], np.int64) for part in (0, 2**40, size)))

    # the eighth copy is too short to measure whether another thread wants the GIL
    for size in (*[4 * 2**20] * 7, 2**20, 4 * 2**20):
        copy(runs(size))
    assert "".join(ways) == "qqqpppq" + "qq"


def test_pieces_are_moved_one_by_one_if_the_system_refuses_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        ctypes.set_errno(1)
        return -1

    for library in (SimpleNamespace(process_vm_readv=refuse), object()):
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, library=library, **__: library)
        assert choose_copy() is copy_by_memmove


def test_an_invalid_address_is_an_error_and_not_a_crash() -> None:
    copy = choose_copy()
    if copy is copy_by_memmove:
        pytest.skip("this system refuses the kernel's scattered copy")
    runs = CopyRuns(*(np.array([part], np.int64) for part in (4096, 8192, 16)))
    with pytest.raises(CopyError, match="Bad address"):
        copy(runs)
