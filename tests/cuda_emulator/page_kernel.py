"""Replaces the page kernel by one that the emulator runs, so that tests do not need Triton."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvoffload.transfer.cuda.driver import KERNEL_COPIES

if TYPE_CHECKING:
    import pytest

    from kvoffload.transfer.cuda.driver import NvidiaDriver
    from kvoffload.transfer.runs import CopyRuns


class PageKernel:
    """Replaces the page kernel. Each launch has its own descriptors."""

    programs: ClassVar[list[int]] = []
    """the number of thread blocks of each kernel that was created"""

    def __init__(self, driver: NvidiaDriver, stream: int, programs: int) -> None:
        self._driver, self._stream = driver, stream
        self.programs.append(programs)

    def enqueue(self, runs: CopyRuns) -> None:
        count = len(runs)
        assert count <= KERNEL_COPIES
        rows = self._driver.pinned(24 * count).view(np.int64).reshape(3, count)
        rows[0], rows[1], rows[2] = runs.target, runs.source, runs.size
        words = ctypes.c_uint64(rows.ctypes.data), ctypes.c_int32(count)
        places = (ctypes.c_void_p * 2)(*map(ctypes.addressof, words))
        launch, kernel = self._driver.library.cuLaunchKernel, ctypes.c_char_p(b"_copy_runs")
        launch(kernel, 1, 1, 1, 1, 1, 1, 0, self._stream, places, None)


def install(patch: pytest.MonkeyPatch) -> type[PageKernel]:
    """Make the driver use this `PageKernel` instead of the shipped one."""
    module = ModuleType("kvoffload.transfer.cuda.page_kernel")
    module.PageKernel = PageKernel  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(PageKernel, "programs", [])
    return PageKernel
