"""What is in flight (R3): keys on their way to the host, the device blocks being stored, and offers that wait for a key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.core.job import Job, Offer
from kvoffload.model.ids import BlockKey, DeviceBlockId


class InFlight:
    """The only writer of these three.

    A key leaves when its job's outcome is known: after a failure another block with the key may be stored. A block leaves
    when its last copy has ended: a copy that timed out may still read it.
    """

    def __init__(self) -> None:
        self.blocks: dict[DeviceBlockId, Job] = {}
        """Blocks that a store reads."""
        self.keys: dict[BlockKey, Job] = {}
        """Keys that a store or a fetch is bringing to the host."""
        self.duplicates: dict[BlockKey, list[Offer]] = {}
        """By key, offers of other blocks with that key."""

    def began(self, keys: Iterable[BlockKey], job: Job, blocks: Iterable[DeviceBlockId] = ()) -> None:
        """A job brings these keys to the host; a store reads them from these blocks."""
        self.keys.update(dict.fromkeys(keys, job))
        self.blocks.update(dict.fromkeys(blocks, job))

    def wait(self, duplicate: Offer) -> None:
        """Keep an offer until the job that brings its key has an outcome."""
        self.duplicates.setdefault(duplicate.key, []).append(duplicate)

    def ended(self, keys: Sequence[BlockKey]) -> list[Offer]:
        """Forget keys whose job has an outcome; return the offers that waited for them."""
        in_flight, duplicates = self.keys, self.duplicates
        for key in keys:
            del in_flight[key]
        if not duplicates:
            return []
        return [offer for key in keys if key in duplicates for offer in duplicates.pop(key)]

    def copies_ended(self, job: Job) -> None:
        """Forget the blocks of a job whose last copy has ended."""
        blocks = self.blocks
        for block in job.blocks:
            del blocks[block]
