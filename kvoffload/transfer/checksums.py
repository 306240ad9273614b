"""Checksums of a rank's host slots: taken when a store or a fetch has filled a slot, compared when a load or a spill has read it.

A load is compared after its copy, not before, so no byte can change unnoticed in between: what the host holds after the
copy it held during the copy (unless it was wrong and has become right again). The hook still starts loads at once. By
then a bad block's bytes lie on the device, which does no harm: its load is not reported yet, its blocks are leased
until it is, and a failed copy leaves no better bytes.

Not noticed: bytes that were wrong when the store arrived, and bytes that change on their way to the device.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.model.transfer import Direction
from kvoffload.transfer.ports import TicketState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor, Future

    from kvoffload.transfer.runs import Numbers
    from kvoffload.transfer.slot_digests import SlotDigests

    Positions = tuple[int, ...]


class ChecksumTicket:
    """One batch whose slots are being read.

    Args:
        work: the reading.
    """

    copy_seconds = 0.0
    """The time of reading counts as waiting."""

    def __init__(self, work: Future[Positions]) -> None:
        self._work = work
        self.corrupt: Positions = ()
        """Of an ended load: positions of slots whose bytes are not those that were stored."""

    def query(self) -> TicketState:
        """Return whether the slots have been read.

        Raises:
            Exception: what reading them raised; nothing runs any more.
        """
        if not self._work.done():
            return TicketState.PENDING
        try:
            self.corrupt = self._work.result()
        except CancelledError:
            return TicketState.FAILED
        return TicketState.DONE


class Checksums:
    """The checksums of one rank's slots, and the only writer of them.

    A slot's checksum is written before its store or fetch is reported and read after that, so two threads never access it at once.

    Args:
        digests: reads slots.
        slots: how many there will be.
        executor: its threads read; the caller never does.
    """

    def __init__(self, digests: SlotDigests, slots: int, executor: Executor) -> None:
        self._digests = digests
        self._executor = executor
        self._known = np.zeros(slots, np.uint64)
        self._work = {Direction.STORE: self._take, Direction.LOAD: self._compare}

    def start(self, direction: Direction, slots: Numbers) -> ChecksumTicket:
        """Begin to take the checksums of slots that stores have filled, or to compare those of slots that loads read.

        Raises:
            Exception: nothing was started.
        """
        return ChecksumTicket(self._executor.submit(self._work[direction], slots))

    def take(self, *slots: int) -> None:
        """Take the checksums of slots that a fetch has filled. The calling thread reads them."""
        self._take(np.array(slots))

    def is_as_stored(self, slot: int) -> bool:
        """Whether a slot still holds the bytes that arrived. The calling thread reads them."""
        return not self.changed((slot,))

    def changed(self, slots: Sequence[int]) -> Positions:
        """Return the positions in `slots` of those that no longer hold the bytes that arrived. The calling thread reads them."""
        return self._compare(np.array(slots))

    def _take(self, slots: Numbers) -> Positions:
        self._known[slots] = self._digests(slots)
        return ()

    def _compare(self, slots: Numbers) -> Positions:
        """A slot that was never seen to be filled compares as unequal."""
        return tuple(np.flatnonzero(self._digests(slots) != self._known[slots]).tolist())
