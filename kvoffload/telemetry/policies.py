"""Which share of the recent prompts each store policy would have found, and which of the policies to use.

Each policy has a miniature of the device and the host, with a sample of the blocks and an equal share of the slots
(as SHARDS does). All miniatures get the same requests, so their differences do not depend on the policy in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from xxhash import xxh3_64_intdigest

from kvoffload.core.recent import RecentItems
from kvoffload.model.ids import BlockKey

SAMPLE_BLOCKS = 8192
"""The most blocks that a miniature has."""
_ALL = 1 << 64  # above every hash
_SMALLER = 0.75  # what is left of the sample when it is too large
_GAIN = 0.01  # another policy must have found this share of blocks more
_FADE = 0.8  # at each decision, what was counted before counts so much


class Miniature:
    """The sampled blocks that the device and the host would have with one store policy.

    Args:
        policy: the policy.

    Attributes:
        found: how many sampled lookups found their block.
    """

    def __init__(self, policy: str) -> None:
        self.found = 0.0
        self._policy = policy
        # The least recently used blocks come first.
        self._device: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._offered = RecentItems[int]()

    def __len__(self) -> int:
        return len(self._device) + len(self._host)

    def look_up(self, blocks: Sequence[int]) -> None:
        """Count how many of a prompt's first blocks are on the device, and then on the host."""
        place = 0
        for tier in (self._device, self._host):
            while place < len(blocks) and blocks[place] in tier:
                place += 1
        self.found += place

    def use(self, blocks: Sequence[int], fresh: Collection[int], device: float, host: float) -> None:
        """Use a request's blocks, the deepest first, and evict blocks for which there is no space.

        Args:
            blocks: all of the request's blocks so far, heads first.
            fresh: the blocks that the request has not offered to the host before.
            device: how many blocks the device has space for.
            host: how many blocks the host has space for.
        """
        for block in reversed(blocks):
            self._device[block] = None
            self._device.move_to_end(block)
            if block in self._host:
                self._host.move_to_end(block)
            elif block in fresh and self._is_stored(block, host):
                self._host[block] = None
        if self._policy == "twice":
            for block in fresh:
                self._offered.add(block, host)
        while len(self._device) > device:
            self._evict_from_device()
        while len(self._host) > host:
            self._host.popitem(last=False)

    def clear(self) -> None:
        self._device.clear()
        self._host.clear()

    def forget(self, below: int) -> None:
        """Keep only blocks whose hash is less than `below`."""
        self._device = OrderedDict.fromkeys(block for block in self._device if block < below)
        self._host = OrderedDict.fromkeys(block for block in self._host if block < below)
        self.found *= _SMALLER

    def _is_stored(self, block: int, host: float) -> bool:
        if self._policy == "twice":
            return block in self._offered or len(self._host) < host
        return self._policy == "eager"

    def _evict_from_device(self) -> None:
        block, _ = self._device.popitem(last=False)
        if self._policy == "lazy" and block not in self._host:
            # Its lease takes the block out of the free queue. Afterwards the block joins the queue's end.
            self._host[block] = self._device[block] = None


class PolicyChoice:
    """Compares the store policies, and names the one to use.

    A decision is made each time when as many blocks were used as the device and the host have, because a change takes
    about so long to show.

    Args:
        policies: the policies to compare.

    Attributes:
        rate: the sampled share of all blocks.
        chosen: the policy to use, after the first decision; None before.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self.rate = 1.0
        self.chosen: str | None = None
        self._miniatures = {policy: Miniature(policy) for policy in policies}
        self._threshold = _ALL
        self._lookups = 0.0  # of blocks in the sample and of others
        self._sampled = 0.0
        self._used = 0
        self._device = self._host = 0.0

    def set_sizes(self, device: float, host: float) -> None:
        """Set how many blocks fit on the device and on the host."""
        self._device = device
        self._host = host

    def request(self, keys: Sequence[BlockKey], asked: int) -> list[int]:
        """Look up a request's first `asked` blocks and use all of them; return the sampled ones."""
        sample = self._sample(keys)
        blocks = [block for block, _ in sample]
        sampled = blocks[: sum([place < asked for _, place in sample])]
        self._lookups += asked
        self._sampled += len(sampled)
        for miniature in self._miniatures.values():
            miniature.look_up(sampled)
        self._use(blocks, blocks)
        return blocks

    def grown(self, blocks: list[int], keys: Sequence[BlockKey]) -> None:
        """Add blocks that a request has computed to its blocks in the sample, and use all of them."""
        if new := [block for block, _ in self._sample(keys)]:
            blocks += new
            self._use(blocks, new)

    def forget(self) -> None:
        """Forget all blocks, as after a reset of the cache."""
        for miniature in self._miniatures.values():
            miniature.clear()

    def found(self) -> Mapping[str, float]:
        """Return for each policy which share of the recent prompts' blocks it would have found.

        The difference between the expected and the actual number of sampled lookups counts as found, as in `reuse`.
        """
        expected = self._lookups * self.rate
        if not expected:
            return {}
        hot = expected - self._sampled
        return {
            policy: min(max(miniature.found + hot, 0.0) / expected, 1.0)
            for policy, miniature in self._miniatures.items()
        }

    def decide(self, used: str, allowed: Collection[str]) -> None:
        """Choose a policy, if enough blocks were used since the last decision.

        Args:
            used: the policy in use, which stays unless another one has found clearly more.
            allowed: the policies that may be chosen.
        """
        if self._used < (self._device + self._host) * self.rate or not self._lookups:
            return
        self._used = 0
        found = {
            policy: mini.found for policy, mini in self._miniatures.items() if policy in {*allowed, used}
        }
        best = max(found, key=found.__getitem__)
        gain = found[best] - found.get(used, 0.0)
        self.chosen = best if gain > _GAIN * self._lookups * self.rate else used
        self._lookups *= _FADE
        self._sampled *= _FADE
        for miniature in self._miniatures.values():
            miniature.found *= _FADE

    def _sample(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return the hashes and places of the keys that are in the sample."""
        below = self._threshold
        return [(block, place) for place, key in enumerate(keys) if (block := xxh3_64_intdigest(key)) < below]

    def _use(self, blocks: Sequence[int], fresh: Sequence[int]) -> None:
        device, host, new = self._device * self.rate, self._host * self.rate, set(fresh)
        for miniature in self._miniatures.values():
            miniature.use(blocks, new, device, host)
        self._used += len(fresh)
        if max(map(len, self._miniatures.values())) > SAMPLE_BLOCKS:
            self._threshold = int(self._threshold * _SMALLER)
            self.rate *= _SMALLER
            self._sampled *= _SMALLER
            for miniature in self._miniatures.values():
                miniature.forget(self._threshold)
