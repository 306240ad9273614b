"""Fake device memory for tests, which is in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

if TYPE_CHECKING:
    from collections.abc import Sequence


class FakeDevice:
    """Blocks in the layout of an engine's KV cache, filled with random bytes. Each region is a separate array.

    Args:
        blocks: the number of blocks.
        pages: for each region, the size of a page in bytes. A block has one page in each region.
        padding: for each region, the number of bytes between the pages of neighbouring blocks; by default 0.
        seed: the seed of the random bytes.
    """

    def __init__(
        self, blocks: int, pages: Sequence[int], padding: Sequence[int] | None = None, *, seed: int = 0
    ) -> None:
        random = np.random.default_rng(seed)
        gaps = padding or [0] * len(pages)
        self._pages = tuple(pages)
        self._arrays = [
            random.integers(0, 256, (blocks, page + gap), np.uint8)
            for page, gap in zip(pages, gaps, strict=True)
        ]
        self.layout = DeviceLayout(
            tuple(
                DeviceRegion(array.ctypes.data, array.shape[1], page, blocks, "cpu", array)
                for array, page in zip(self._arrays, pages, strict=True)
            )
        )

    def read(self, block: int) -> bytes:
        """Return a block's pages from all regions, joined in the order of the regions."""
        return b"".join(
            array[block, :page].tobytes() for array, page in zip(self._arrays, self._pages, strict=True)
        )

    def write(self, block: int, data: bytes) -> None:
        """Overwrite a block. `data` has the block's pages for all regions, joined in the order of the regions."""
        rest = np.frombuffer(data, np.uint8)
        for array, page in zip(self._arrays, self._pages, strict=True):
            array[block, :page], rest = rest[:page], rest[page:]

    def snapshot(self) -> bytes:
        """Return the bytes of all blocks, including the padding."""
        return b"".join(array.tobytes() for array in self._arrays)
