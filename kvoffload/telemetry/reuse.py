"""How many blocks tiers of any size would have found, from the reuse distances of a sample of the blocks.

A block's reuse distance is the number of distinct blocks used since its last use, including itself. A tier that evicts
the least recently used block first finds exactly the blocks whose distance is not above its capacity. So one pass over
the requests answers for every capacity.

Only a sample is followed: the blocks whose key's hash is below a threshold. Among them a distance is shorter by the
sampled share. When there are too many, those that no tier of an interesting size would still have are forgotten, and
then the threshold is lowered (SHARDS with a fixed size). A few hot blocks, such as the first block of every prompt, can
lie outside the sample. So the difference between the expected and the actual number of sampled lookups counts as found
at every capacity (SHARDS-adj).

A block is useful only if all blocks before it are found. Requests use their blocks deepest first (R15), so the blocks
before a block were never used earlier than the block itself, and their distances are never longer. Therefore the blocks
within a distance are always the beginning of a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import ceil, inf, log2, sqrt

from xxhash import xxh3_64_intdigest

from kvoffload.model.ids import BlockKey

SAMPLE_KEYS = 8192
_ALL = 1 << 64  # above every hash
_PER_OCTAVE = 16  # counts of distances have a relative precision of 1/16 of an octave
_BUCKETS = 40 * _PER_OCTAVE
_DEEPEST = 1 << 24  # more blocks than any prompt has


class Uses:
    """The last use of each sampled block. Times are numbers; a later use has a larger one."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._times: list[int] = []  # the same times, sorted

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, block: int) -> bool:
        return block in self._last

    def since(self, block: int) -> float:
        """Return how many blocks were used since the block's last use, including itself; infinity if there is none."""
        last = self._last.get(block)
        return inf if last is None else len(self._times) - bisect_left(self._times, last)

    def use(self, block: int, time: int) -> None:
        last = self._last.get(block)
        if last is not None:
            del self._times[bisect_left(self._times, last)]
        self._last[block] = time
        insort(self._times, time)

    def keep(self, newest: float, below: int = _ALL) -> None:
        """Forget all but the most recently used blocks, and blocks whose hash is not less than `below`."""
        first = self._times[-ceil(newest)] if 0 < newest < len(self._times) else 0
        self._last = {block: time for block, time in self._last.items() if time >= first and block < below}
        self._times = sorted(self._last.values())

    def threshold(self, most: int) -> int:
        """Return the largest hash below which there are at most `most` blocks."""
        return sorted(self._last)[most] if len(self._last) > most else _ALL


class ReuseCurve:
    """Counts at which capacities of the host, and of a disk below today's host, lookups would have found blocks.

    Args:
        size: how many blocks are followed at most, on the host and on the disk each.
        disk_takes_all: False if a block goes to the disk only after it was found again.

    Attributes:
        host: how many blocks today's host finds, together with the device.
        most_host, most_disk: the largest capacities of interest, in blocks.
        lookups: how many blocks were looked up.
        rate: the sampled share of all blocks.
    """

    def __init__(self, size: int = SAMPLE_KEYS, *, disk_takes_all: bool = False) -> None:
        self.host = self.most_host = self.most_disk = inf
        self.lookups = 0.0
        self.rate = 1.0
        self._size = size
        self._disk_takes_all = disk_takes_all
        self._threshold = _ALL
        self._time = 0
        self._host_uses, self._disk_uses = Uses(), Uses()
        # All counts are of sampled lookups, and follow the threshold.
        self._on_host, self._on_disk = [0.0] * _BUCKETS, [0.0] * _BUCKETS
        self._sampled = 0.0  # all lookups
        self._first_uses = 0.0  # lookups and other uses of blocks that were not followed before

    def request(self, keys: Sequence[BlockKey], asked: int) -> int:
        """Count a request's lookups of its first `asked` blocks and the use of all its blocks; return the time."""
        self._time += _DEEPEST
        self.lookups += asked
        sample = self._sample(keys)
        found = [self._find(block, depth < asked) for block, depth in sample]
        for (block, depth), is_found in zip(reversed(sample), reversed(found), strict=True):
            self._use(block, self._time - depth, is_found=is_found)
        self._bound()
        return self._time

    def grown(self, time: int, depth: int, keys: Sequence[BlockKey]) -> None:
        """Add blocks that a request has computed since `request` returned `time`; `depth` blocks lie before them."""
        for block, after in self._sample(keys):
            if block not in self._host_uses:
                self._use(block, time - depth - after, is_found=False)
        self._bound()

    def forget(self) -> None:
        """Forget all blocks, as after a reset of the cache."""
        self._host_uses, self._disk_uses = Uses(), Uses()

    def halve(self) -> None:
        """Halve all counts, so that new lookups count twice as much as older ones."""
        self.lookups /= 2
        self._scale(0.5)

    def host_hits(self, capacity: float) -> float:
        """Return how many lookups a host would have found of which, with the device, `capacity` blocks are kept."""
        return self._hits(self._on_host, capacity)

    def disk_hits(self, capacity: float) -> float:
        """Return how many lookups today's host and a disk of `capacity` blocks would have found together."""
        return self._hits(self._on_disk, capacity + 1)

    @property
    def margin(self) -> float:
        """Return by what share of the lookups hits may be off because only a sample is followed (two deviations)."""
        return min(2 * sqrt((1 - self.rate) / self._sampled), 1.0) if self._sampled else 1.0

    def unknown(self, capacity: float) -> float:
        """Return how many lookups a tier of this capacity might have found, had it been filled before the first request.

        Until as many blocks as fit were used, blocks count as new that an earlier process may have had.
        """
        return min(capacity, self._first_uses / self.rate, self.lookups)

    def _sample(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return the hashes and places of the keys that are in the sample."""
        below = self._threshold
        return [(block, place) for place, key in enumerate(keys) if (block := xxh3_64_intdigest(key)) < below]

    def _find(self, block: int, is_asked: bool) -> bool:
        """Count a lookup, if the request asked for the block, and return whether it is on today's host or on a disk."""
        on_host = self._distance(self._host_uses, block)
        # On the disk's scale, 1 is a block on the host, and longer distances are one more than on the disk.
        on_disk = 1.0 if on_host <= self.host else 1 + self._distance(self._disk_uses, block)
        self._first_uses += on_host == inf
        if is_asked:
            self._sampled += 1
            _count(self._on_host, on_host)
            _count(self._on_disk, on_disk)
        return on_disk < inf

    def _distance(self, uses: Uses, block: int) -> float:
        return 1 + (uses.since(block) - 1) / self.rate

    def _use(self, block: int, time: int, *, is_found: bool) -> None:
        self._host_uses.use(block, time)
        if is_found or self._disk_takes_all:
            self._disk_uses.use(block, time)

    def _bound(self) -> None:
        """Keep the sample within its size."""
        both = (self._host_uses, self.most_host), (self._disk_uses, self.most_disk)
        if max(len(uses) for uses, _ in both) <= self._size:
            return
        for uses, most in both:
            uses.keep(most * self.rate)
        threshold = min(uses.threshold(self._size * 3 // 4) for uses, _ in both)
        if threshold < self._threshold:
            for uses, _ in both:
                uses.keep(inf, threshold)
            self._scale(threshold / self._threshold)
            self._threshold, self.rate = threshold, threshold / _ALL

    def _scale(self, factor: float) -> None:
        self._on_host = [count * factor for count in self._on_host]
        self._on_disk = [count * factor for count in self._on_disk]
        self._sampled *= factor
        self._first_uses *= factor

    def _hits(self, counts: Sequence[float], capacity: float) -> float:
        if capacity < 1 or not self._sampled:
            return 0.0
        place = _place(
            capacity + 0.5
        )  # distances up to the capacity, which are whole numbers without sampling
        low, high = 2 ** (place / _PER_OCTAVE), 2 ** ((place + 1) / _PER_OCTAVE)
        within = sum(counts[:place]) + counts[place] * (capacity + 0.5 - low) / (high - low)
        hot = self.lookups * self.rate - self._sampled
        return min(max(within + hot, 0.0) / self.rate, self.lookups)


def _count(counts: list[float], distance: float) -> None:
    if distance < inf:
        counts[_place(distance)] += 1


def _place(distance: float) -> int:
    return min(int(_PER_OCTAVE * log2(distance)), _BUCKETS - 1)
