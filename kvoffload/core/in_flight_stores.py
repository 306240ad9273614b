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
        for offer in offers:
            self._blocks[offer.block] = job
            self._keys[offer.key] = job

    def wait(self, offer: Offer) -> None:
        """Another block with the same key is on its way: this offer is settled by how that ends."""
        self._waiting.setdefault(offer.key, []).append(offer)

    def settled(self, keys: Iterable[BlockKey]) -> list[Offer]:
        """The outcome for these keys is known: let the keys go and return who waited."""
        waited: list[Offer] = []
        for key in keys:
            del self._keys[key]
            if key in self._waiting:
                waited += self._waiting.pop(key)
        return waited

    def ended(self, blocks: Iterable[DeviceBlockId]) -> None:
        """The last copy on these blocks has ended."""
        for block in blocks:
            del self._blocks[block]

    def waiting(self) -> Mapping[BlockKey, list[Offer]]:
        """Return who waits, by key. Reads only."""
        return self._waiting
