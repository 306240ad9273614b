from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.testing import FakeClock
from kvoffload.transfer.host_copier import HostCopier, WatchfulCopy, choose_copy, copy_by_memmove
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.gates import ManualExecutor


def runs_between(source: np.ndarray, target: np.ndarray) -> CopyRuns:
    numbers = ([source.ctypes.data], [target.ctypes.data], [source.nbytes])
    return CopyRuns(*(np.array(part, np.int64) for part in numbers))


def test_a_ticket_is_pending_until_the_bytes_have_arrived() -> None:
    executor, clock = ManualExecutor(), FakeClock()
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)

    def copy(runs: CopyRuns) -> None:
        clock.jump(0.5)
        copy_by_memmove(runs)

    copier = HostCopier(executor, clock, copy)
    ticket = copier.submit(Direction.STORE, runs_between(source, target), (copier.fence(),))
    assert ticket.query() is TicketState.PENDING
    assert ticket.copy_seconds is None
    executor.run_next()
    assert ticket.query() is TicketState.DONE
    assert ticket.copy_seconds == 0.5
    assert (target == source).all()


def test_a_copy_that_raises_fails_the_query() -> None:
    def copy(runs: CopyRuns) -> None:
        raise CopyError("torn")

    copier = HostCopier(ManualExecutor(held=False), FakeClock(), copy)
    ticket = copier.submit(Direction.LOAD, runs_between(np.zeros(1), np.zeros(1)), ())
    with pytest.raises(CopyError, match="torn"):
        ticket.query()


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

    for _ in range(7):
        copy(runs(4 * 2**20))
    assert "".join(ways) == "qqqpppq"
    copy(runs(2**20))  # this copy is too short to measure whether another thread wants the GIL
    copy(runs(4 * 2**20))
    assert "".join(ways) == "qqqpppq" + "qq"


def test_pieces_are_moved_one_by_one_if_the_system_refuses_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __call__(self, *args: object) -> int:
            ctypes.set_errno(1)
            return -1

    class Library:
        process_vm_readv = Refusing()

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Library())
    assert choose_copy() is copy_by_memmove
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    assert choose_copy() is copy_by_memmove


def test_an_invalid_address_is_an_error_and_not_a_crash() -> None:
    copy = choose_copy()
    if copy is copy_by_memmove:
        pytest.skip("this system refuses the kernel's scattered copy")
    runs = CopyRuns(*(np.array([part], np.int64) for part in (4096, 8192, 16)))
    with pytest.raises(CopyError, match="Bad address"):
        copy(runs)
