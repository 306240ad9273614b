"""The pages of a host slot, as copies into one piece of memory: what lower tiers read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    from kvoffload.transfer.arena import Arena
    from kvoffload.transfer.runs import Numbers


def pages_to(buffer: memoryview, arena: Arena, slot: int) -> CopyRuns:
    """Return the copies that gather a slot's pages in a buffer, region by region."""
    geometry = arena.geometry
    source: Numbers = geometry.host_base[slot // geometry.chunk_slots] + (
        slot % geometry.chunk_slots * geometry.page
    )
    ends = np.cumsum(geometry.page)
    return CopyRuns(source, np.frombuffer(buffer, np.uint8).ctypes.data + ends - geometry.page, geometry.page)


def pages_from(buffer: memoryview, arena: Arena, slot: int) -> CopyRuns:
    """Return the copies that put a buffer's bytes into a slot's pages."""
    pages = pages_to(buffer, arena, slot)
    return CopyRuns(pages.target, pages.source, pages.size)
