"""In-flight stores (R3): device blocks and keys whose store is open, and the duplicates that wait for how it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.core.job import Job, Offer
from kvoffload.model.ids import BlockKey, DeviceBlockId


class InFlightStores:
    """The only writer of these three.

    A key leaves when its job's outcome is known: after a failure a second block with the key may be offered again. A
    block leaves when the last copy has ended: an abandoned copy may still read it.
    """

    def __init__(self) -> None:
        self.blocks: dict[DeviceBlockId, Job] = {}
        """Blocks that a store job reads."""
        self.keys: dict[BlockKey, Job] = {}
        """Keys that a store job is bringing to the host."""
        self.duplicates: dict[BlockKey, list[Offer]] = {}
        """By key: offers of other blocks with that key."""

    def started(self, job: Job, keys: Iterable[BlockKey], blocks: Iterable[DeviceBlockId]) -> None:
        """A job took these keys, which these blocks hold."""
        self.keys.update(dict.fromkeys(keys, job))
        self.blocks.update(dict.fromkeys(blocks, job))

    def wait(self, duplicate: Offer) -> None:
        """Another block with the same key is being stored: keep this offer until that store ends."""
        self.duplicates.setdefault(duplicate.key, []).append(duplicate)

    def forget(self, keys: Sequence[BlockKey]) -> list[Offer]:
        """No job brings these keys to the host any more: return the duplicates that waited for them."""
        in_flight, duplicates = self.keys, self.duplicates
        for key in keys:
            del in_flight[key]
        if not duplicates:
            return []
        return [offer for key in keys if key in duplicates for offer in duplicates.pop(key)]

    def copies_ended(self, job: Job) -> None:
        """The last copy of the job's blocks has ended."""
        blocks = self.blocks
        for block in job.blocks:
            del blocks[block]
