"""Finds the stores whose blocks a load reads: the last ones into its slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvoffload.model.ids import JobId, Rank, SlotId
from kvoffload.telemetry.trace import Track

Place = tuple[Track, float]


class SlotHistory:
    """Keeps the store that filled each slot, and where each such store was drawn."""

    def __init__(self) -> None:
        self._filled_by: dict[SlotId, JobId] = {}
        self._slots_left: dict[JobId, int] = {}
        self._places: dict[JobId, dict[Rank, Place]] = {}
        self._sources: dict[JobId, list[JobId]] = {}

    def stored(self, job: JobId, slots: Sequence[SlotId]) -> None:
        """A store will fill these slots; forget what they held."""
        if not slots:
            return
        self._slots_left[job] = len(slots)
        for slot in slots:
            before = self._filled_by.get(slot)
            self._filled_by[slot] = job
            if before is not None:
                self._forget_one(before)

    def loaded(self, job: JobId, slots: Sequence[SlotId]) -> None:
        """A load will read these slots."""
        self._sources[job] = sorted({self._filled_by[slot] for slot in slots if slot in self._filled_by})

    def drawn(self, job: JobId, rank: Rank, place: Place) -> None:
        """Keep where a rank's part of a store was drawn."""
        if job in self._slots_left:
            self._places.setdefault(job, {})[rank] = place

    def sources(self, job: JobId, rank: Rank) -> Iterator[tuple[JobId, Place]]:
        """Yield the stores whose blocks a load read, and where they were drawn on this rank."""
        for store in self._sources.get(job, []):
            if (place := self._places.get(store, {}).get(rank)) is not None:
                yield store, place

    def forget_load(self, job: JobId) -> None:
        """Forget the sources of a load; does nothing for a store."""
        self._sources.pop(job, None)

    def _forget_one(self, job: JobId) -> None:
        self._slots_left[job] -= 1
        if not self._slots_left[job]:
            del self._slots_left[job]
            self._places.pop(job, None)
