"""How many bytes of stores may be in flight, by what they are seen to do to others.

Nobody waits for a store, but what it moves is taken from somebody: from a load on the same bus, from the forward pass on
the same memory. Two things that the flow sees anyway tell of it:

* a load is pending while a batch of stores ends: they have met;
* a batch took twice as long as such batches can: the way is shared with someone whom this process may not even know.

Either halves the bound, a batch that ends without either gives back an eighth of the ceiling. So a load now and then costs
nothing, and under loads that never pause stores go on by a batch or two at a time. A cut needs time to show: batches that
were submitted before it say nothing more.

    ceiling  ────╮          ╭──────        while it is low, a queued store starts when the one before it was seen to end,
                 ╰─╮     ╭──╯              which leaves the way free in between
    floor          ╰─────╯
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvoffload.transfer.ports import HELD_COPIES

if TYPE_CHECKING:
    from kvoffload.transfer.lanes import Batch

_FLOOR = 8  # parts of the ceiling: a batch or two, or the coroutine's own pace would starve the stores
_STEP = 8  # parts of the ceiling that an undisturbed batch gives back
_SLOW = 2.0  # times the best: what a copy takes by itself varies by less
_LOCK_S = 0.01  # what waits for the interpreter's lock may add to the time of a batch that is enqueued in several calls
_FORGET = 0.98  # of the best speed, with each batch: a faster moment is no measure for good


class StoreBound:
    """The bound on bytes of submitted stores. Its methods must exclude each other; `bytes` is readable from any thread.

    Args:
        ceiling: the most that it can be, in bytes, and what it begins with.
        slot_bytes: bytes of one block; two of them are never held back where the ceiling allows them.
    """

    def __init__(self, ceiling: int, slot_bytes: int) -> None:
        self.bytes = ceiling
        """What holds now."""
        self._ceiling = ceiling
        self._floor = min(max(ceiling // _FLOOR, 2 * slot_bytes), ceiling)
        self._step = max(ceiling // _STEP, slot_bytes)
        self._cut_at = -inf
        self._best: dict[int, float] = {}  # bytes a second, by the magnitude of the mean copy

    @property
    def share(self) -> float:
        """What holds now, over the ceiling."""
        return self.bytes / self._ceiling

    def batch_ended(self, batch: Batch, copy_s: float, now: float, *, is_load_pending: bool) -> None:
        """Hear that a batch of stores has ended well.

        Args:
            batch: which.
            copy_s: seconds that its copies took.
            now: when its end was noticed.
            is_load_pending: whether a load had not ended when it was looked for.
        """
        if not self._is_slow(batch, copy_s) and not is_load_pending:
            self.bytes = min(self.bytes + self._step, self._ceiling)
        elif batch.submitted_at >= self._cut_at:
            self.bytes = max(self.bytes // 2, self._floor)
            self._cut_at = now

    def _is_slow(self, batch: Batch, copy_s: float) -> bool:
        """Compare with batches whose copies are about as long; a small batch is mostly what it costs to begin one."""
        if copy_s <= 0 or 2 * batch.size < self._floor:
            return False
        kind = (batch.size // batch.copies).bit_length()
        speed = batch.size / copy_s
        best = max(speed, _FORGET * self._best.get(kind, 0.0))
        self._best[kind] = best
        return speed * _SLOW < best and (batch.copies <= HELD_COPIES or copy_s - batch.size / best > _LOCK_S)
