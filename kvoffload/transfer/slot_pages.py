"""The pages of host slots, as copies into one piece of memory: what lower tiers read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffload.transfer.arena import Arena


def pages_to(
    buffer: memoryview, arena: Arena, slots: Sequence[int], places: Sequence[int] = (0,)
) -> CopyRuns:
    """Return the copies that gather slots in a buffer, at these places in it, each region by region."""
    geometry = arena.geometry
    source = geometry.page_addresses(np.array(slots, np.int64))
    first = np.frombuffer(buffer, np.uint8).ctypes.data + np.cumsum(geometry.page) - geometry.page
    target = first + np.array(places, np.int64)[:, None]
    return CopyRuns(source.ravel(), target.ravel(), np.tile(geometry.page, len(slots)))


def pages_from(
    buffer: memoryview, arena: Arena, slots: Sequence[int], places: Sequence[int] = (0,)
) -> CopyRuns:
    """Return the copies that put what a buffer has at these places into the pages of slots."""
    pages = pages_to(buffer, arena, slots, places)
    return CopyRuns(pages.target, pages.source, pages.size)
