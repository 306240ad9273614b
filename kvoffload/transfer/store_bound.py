"""The limit on bytes of stores in flight, adapted to how stores disturb other work.

No request waits for a store, but a store takes bandwidth from loads on the same bus and from the forward pass on the same
memory. Two observations show it:

* a load is pending when a batch of stores ends: they ran at the same time;
* a batch took twice as long as the best such batches: other work shares the bus, perhaps in another process.

Either halves the bound. A batch that ends without either raises it by an eighth of the ceiling. So an occasional load costs
nothing, and under continuous loads stores proceed by a batch or two at a time. A cut takes time to show: batches that were
submitted before it do not count.

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
_STEP = 8  # an undisturbed batch raises the bound by this part of the ceiling
_SLOW = 2.0  # times the best: undisturbed copies vary by less
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
        """The current bound."""
        self._ceiling = ceiling
        self._floor = min(max(ceiling // _FLOOR, 2 * slot_bytes), ceiling)
        self._step = max(ceiling // _STEP, slot_bytes)
        self._cut_at = -inf
        self._best: dict[int, float] = {}  # bytes a second, by the magnitude of the mean copy

    @property
    def share(self) -> float:
        """The current bound as a share of the ceiling."""
        return self.bytes / self._ceiling

    def batch_ended(self, batch: Batch, copy_s: float, now: float, *, is_load_pending: bool) -> None:
        """Take note of a batch of stores that was copied.

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
