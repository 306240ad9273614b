"""Scratch memory is asked for as CUDA declares it, and given back whatever happens; a stand-in takes the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from kvoffload.model.errors import CopyError, HostMemoryError
from kvoffload.transfer import cuda_scratch
from kvoffload.transfer.cuda_scratch import lend_scratch

SIZE, STREAM = 4096, 0x77
OWN_MODE, RELAXED = 0, 2


class Library:
    """A driver whose device memory is the host's."""

    def __init__(self, *, offset: int = 0, code: int = 0) -> None:
        self.offset, self.code = offset, code
        self.mode = OWN_MODE
        self.calls: list[tuple[str, int]] = []
        self.memory = np.zeros(SIZE, np.uint8)

    def cuMemAllocAsync(self, address: object, size: ctypes.c_size_t, stream: ctypes.c_void_p) -> int:
        assert (size.value, stream.value, self.mode) == (SIZE, STREAM, RELAXED)
        address._obj.value = self.memory.ctypes.data  # type: ignore[attr-defined]
        self.calls.append(("alloc", address._obj.value))  # type: ignore[attr-defined]
        return self.code

    def cuMemFreeAsync(self, address: ctypes.c_uint64, stream: ctypes.c_void_p) -> int:
        assert stream.value == STREAM
        self.calls.append(("free", address.value))
        return 0

    def cuMemHostGetDevicePointer_v2(self, seen: object, address: ctypes.c_void_p, flags: int) -> int:
        seen._obj.value = (address.value or 0) + self.offset  # type: ignore[attr-defined]
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:
        before, self.mode = self.mode, mode._obj.value  # type: ignore[attr-defined]
        mode._obj.value = before  # type: ignore[attr-defined]
        return 0

    def register(self, address: int, size: int) -> None:
        assert size == 2 * SIZE
        self.calls.append(("register", address))

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))

    def lend(self, is_idle: Callable[[], bool] = lambda: True):  # type: ignore[no-untyped-def]  # noqa: ANN201
        return lend_scratch(self, self, SIZE, STREAM, is_idle)  # type: ignore[arg-type]

    def done(self) -> list[str]:
        return [what for what, _ in self.calls]


def test_it_is_lent_and_given_back_outside_of_captures() -> None:
    library = Library()
    with library.lend() as scratch:
        assert len(scratch.host) == 2 * SIZE
        assert not scratch.host.any()
        scratch.host[:] = 1
        assert scratch.device == library.memory.ctypes.data
        assert library.mode == RELAXED
    assert library.done() == ["register", "alloc", "free", "unregister"]
    assert library.calls[0][1] == library.calls[-1][1]
    assert library.calls[1][1] == library.calls[2][1]
    assert library.mode == OWN_MODE


def test_a_device_that_sees_the_host_elsewhere_gets_no_kernel() -> None:
    """The kernel is handed the host's addresses; another one would end the engine."""
    library = Library(offset=4096)
    with pytest.raises(HostMemoryError, match="cannot use the host's addresses"), library.lend():
        pass
    assert library.done() == ["register", "unregister"]
    assert library.mode == OWN_MODE


def test_refused_device_memory_gives_the_host_memory_back() -> None:
    library = Library(code=2)
    with pytest.raises(CopyError, match="cuMemAllocAsync with error 2"), library.lend():
        pass
    assert library.done() == ["register", "alloc", "unregister"]


def test_host_memory_under_a_copy_that_does_not_end_is_kept() -> None:
    library = Library()
    with library.lend(lambda: False) as scratch:
        address = scratch.host.ctypes.data
    assert library.done() == ["register", "alloc", "free"]
    assert cuda_scratch._kept.pop().ctypes.data == address  # type: ignore[attr-defined]
