"""What a rank's arena will take of the machine, known before it is made."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.transfer.arena import CHUNK_BYTES, region_offsets

KERNEL_PAGE = (
    4096  # what the kernel hands out, and pins, memory in; huge pages lie inside a mapping and round nothing
)


def arena_bytes(bytes_per_rank: int, page_bytes: Sequence[int]) -> int:
    """Return the bytes that are touched, and pinned on a CUDA device: what fits, with all rounding.

    Args:
        bytes_per_rank: what the rank may use.
        page_bytes: one block's bytes in each of the rank's regions.
    """
    slot_bytes = sum(page_bytes)
    slots = bytes_per_rank // slot_bytes
    chunk_slots = max(1, CHUNK_BYTES // slot_bytes)
    chunks, rest = divmod(slots, chunk_slots)
    return chunks * _mapped(page_bytes, chunk_slots) + (_mapped(page_bytes, rest) if rest else 0)


def _mapped(page_bytes: Sequence[int], slots: int) -> int:
    return -(-region_offsets(page_bytes, slots)[-1] // KERNEL_PAGE) * KERNEL_PAGE
