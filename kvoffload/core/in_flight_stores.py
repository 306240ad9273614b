"""In-flight stores (R3): device blocks and keys whose store is open, and who waits for how it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvoffload.core.offers import Offer
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId


class InFlightStores:
    """A block or key is in here from its acceptance until its job's outcome is known, or its copies have ended.

    Keys leave with the outcome (a second block with the key may be offered again after a failure); blocks leave when
    the last copy has ended (a copy that was given up may still read the block).
    """

    def __init__(self) -> None:
        self._blocks: dict[DeviceBlockId, JobId] = {}
        self._keys: dict[BlockKey, JobId] = {}
        self._waiting: dict[BlockKey, list[Offer]] = {}
        self.blocks: Mapping[DeviceBlockId, JobId] = self._blocks
        """Blocks that a store job reads."""
        self.keys: Mapping[BlockKey, JobId] = self._keys
        """Keys that a store job is bringing to the host."""

    def accepted(self, job: JobId, offers: Iterable[Offer]) -> None:
        """A job took these offers."""
        blocks, keys = self._blocks, self._keys
        for offer in offers:
            blocks[offer.block] = job
            keys[offer.key] = job

    def wait(self, offer: Offer) -> None:
        """Another block with the same key is on its way: this offer is settled by how that ends."""
        self._waiting.setdefault(offer.key, []).append(offer)

    def settled(self, keys: Iterable[BlockKey]) -> list[Offer]:
        """The outcome for these keys is known: let the keys go and return who waited."""
        waited: list[Offer] = []
        in_flight, waiting = self._keys, self._waiting
        for key in keys:
            del in_flight[key]
            if waiting and key in waiting:
                waited += waiting.pop(key)
        return waited

    def ended(self, blocks: Iterable[DeviceBlockId]) -> None:
        """The last copy on these blocks has ended."""
        in_flight = self._blocks
        for block in blocks:
            del in_flight[block]

    def waiting(self) -> Mapping[BlockKey, list[Offer]]:
        """Return who waits, by key. Reads only."""
        return self._waiting
