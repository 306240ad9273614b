"""What the driver's library is handed, checked by a stand-in that reads it with C's eyes; no device needed."""

from __future__ import annotations

import ctypes
import sys
import types

import numpy as np
import pytest

from kvoffload.model.errors import CopyError
from kvoffload.model.transfer import Direction
from kvoffload.testing.logs import capture_logs
from kvoffload.transfer import cuda_driver
from kvoffload.transfer.runs import CopyRuns

PIECES = 5


class BatchedLibrary:
    """Reads the arguments of cuMemcpyBatchAsync as CUDA 12.8 declares them, and copies."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.orders: list[int] = []
        self.streams: list[int] = []
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        types_ = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self.callback = ctypes.CFUNCTYPE(ctypes.c_uint, *types_)(self.copy)

    def copy(self, *args: int) -> int:
        targets, sources, sizes, count, attributes, indices, attribute_count, failed, stream = args
        words = ctypes.c_uint64 * count
        if self.code:
            ctypes.c_size_t.from_address(failed).value = 3
            return self.code
        for target, source, size in zip(
            words.from_address(targets), words.from_address(sources), words.from_address(sizes), strict=True
        ):
            ctypes.memmove(target, source, size)
        assert (attribute_count, ctypes.c_size_t.from_address(indices).value) == (1, 0)
        # order, then type and id of two hints, then flags: six numbers of four bytes
        numbers = list((ctypes.c_uint32 * 6).from_address(attributes))
        assert numbers[1:] == [0] * 5
        self.orders.append(numbers[0])
        self.streams.append(stream)
        return 0


def scattered() -> tuple[CopyRuns, np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(0, 256, (PIECES, 64), np.uint8)
    target = np.zeros_like(source)
    rows = np.arange(PIECES, dtype=np.int64) * 64
    runs = CopyRuns(source.ctypes.data + rows, target.ctypes.data + rows[::-1], np.full(PIECES, 64, np.int64))
    return runs, source, target


def test_the_attributes_have_the_size_that_the_driver_expects() -> None:
    assert ctypes.sizeof(cuda_driver._MemcpyAttributes) == 24


def test_a_batch_is_one_call_with_stores_in_stream_order() -> None:
    library = BatchedLibrary()
    enqueue = cuda_driver._batched(library.callback)
    for direction in (Direction.STORE, Direction.LOAD):
        runs, source, target = scattered()
        enqueue(direction, runs, 0x1234)
        assert (target == source[::-1]).all()
    assert library.orders == [1, 3]
    assert library.streams == [0x1234, 0x1234]


def test_a_refused_batch_names_the_copy() -> None:
    enqueue = cuda_driver._batched(BatchedLibrary(code=1).callback)
    with pytest.raises(CopyError, match="cuMemcpyBatchAsync, copy 3 of 5 with error 1"):
        enqueue(Direction.LOAD, scattered()[0], 0)


@pytest.mark.parametrize("code", [0, 700])
def test_one_call_for_each_copy_where_batches_cannot_be_had(code: int) -> None:
    types_ = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(target: int, source: int, size: int, stream: int | None) -> int:
        ctypes.memmove(target, source, size)
        return code

    library = types.SimpleNamespace(cuMemcpyAsync=ctypes.CFUNCTYPE(ctypes.c_uint, *types_)(copy))
    enqueue = cuda_driver._one_by_one(library)  # type: ignore[arg-type]
    runs, source, target = scattered()
    if code:
        with pytest.raises(CopyError, match="error 700"):
            enqueue(Direction.STORE, runs, 1)
    else:
        enqueue(Direction.STORE, runs, 1)
        assert (target == source[::-1]).all()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((0, 4096, 0), True),  # error, address, status
        ((0, 4096), True),
        ((0, 0, 1), False),  # unknown to this driver
        ((1,), False),  # the version asked for is newer than the driver
    ],
)
def test_the_entry_point_is_asked_for_by_version(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, ...], found: bool
) -> None:
    asked: list[tuple[object, ...]] = []

    def look_up(*args: object) -> tuple[int, ...]:
        asked.append(args)
        return answer

    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = types.SimpleNamespace(cuGetProcAddress=look_up)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with capture_logs() as logs:
        assert (cuda_driver._batch_call() is not None) is found
    assert asked == [(b"cuMemcpyBatchAsync", 12080, 0)]
    assert [entry["event"] for entry in logs] == ([] if found else ["batched_copies_unavailable"])


def test_without_the_bindings_there_are_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with capture_logs() as logs:
        assert cuda_driver._batch_call() is None
    assert [entry["event"] for entry in logs] == ["batched_copies_unavailable"]
