from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffload.engine.block_pool import BlockPool


def test_blocks_without_keys_are_allocated_first_then_blocks_in_order_of_release() -> None:
    pool = BlockPool(6)
    a, b, c, d = pool.allocate(4)
    for block in (a, b, c):
        pool.index(block, b"key%d" % block)
    pool.release([c, b])
    pool.release([d])  # `d` has no key, so it is evicted before blocks with keys
    pool.release([a])
    assert pool.next_evictable(9) == [d, 5, c, b, a]
    assert pool.allocate(3) == [d, 5, c]
    assert pool.cached_block(b"key%d" % c) is None
    assert pool.cached_block(b"key%d" % b) == b


def test_a_refused_call_says_why_and_changes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks requested, only 3 are free"):
        pool.allocate(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]  # the null block, 0, is never allocated
    with pytest.raises(ValueError, match="null block"):
        pool.touch([1, 0])
    assert pool.leased_blocks == 0
    pool.touch([1])
    with pytest.raises(ValueError, match="released 2 times; references: 1"):
        pool.free([1, 1])
    assert pool.audit({1: 1, 2: 1, 3: 1}) == []


def test_reset_removes_all_keys_unless_a_block_is_in_use() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.index(block, b"key")
    assert not pool.reset_prefix_cache()
    assert pool.cached_block(b"key") == block
    pool.release([block])
    assert pool.reset_prefix_cache()
    assert pool.cached_block(b"key") is None
    assert pool.audit({}) == []


def test_the_audit_describes_each_inconsistency() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    assert pool.audit({}) == [f"block {block} has 1 request references, the tables have 0"]
    pool._free[block] = None
    assert "1 blocks in use and 3 free of 3" in pool.audit({block: 1})
    pool._keys[2] = b"unknown to the index"
    assert "the index and the blocks' keys disagree" in pool.audit({block: 1})


class PoolAgainstCounters(RuleBasedStateMachine):
    """Compares the pool with a simple model: two counters and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.held: Counter[int] = Counter()
        self.leased: Counter[int] = Counter()
        self.keys: dict[int, bytes] = {}

    def used(self) -> set[int]:
        return {block for counter in (self.held, self.leased) for block, count in counter.items() if count}

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > 7 - len(self.used()):
            with pytest.raises(ValueError, match="requested"):
                self.pool.allocate(count)
            return
        expected = self.pool.next_evictable(count)
        blocks = self.pool.allocate(count)
        assert blocks == expected
        assert not self.used() & set(blocks)
        self.held.update(blocks)
        for block in blocks:
            self.keys.pop(block, None)

    @rule(block=st.integers(1, 7), how=st.sampled_from(["hold", "touch"]))
    def refer(self, block: int, how: str) -> None:
        getattr(self.pool, how)([block])
        (self.held if how == "hold" else self.leased)[block] += 1

    @precondition(lambda self: self.used())
    @rule(data=st.data(), how=st.sampled_from(["release", "free"]))
    def give_back(self, data: st.DataObject, how: str) -> None:
        block = data.draw(st.sampled_from(sorted(self.used())))
        counter = self.held if how == "release" else self.leased
        if counter[block]:
            getattr(self.pool, how)([block])
            counter[block] -= 1
        else:
            with pytest.raises(ValueError, match="references: 0"):
                getattr(self.pool, how)([block])

    @precondition(lambda self: self.used())
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def index(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.used())))
        self.pool.index(block, key)
        self.keys[block] = key

    @invariant()
    def agrees(self) -> None:
        assert self.pool.audit({block: count for block, count in self.held.items() if count}) == []
        assert self.pool.free_blocks == 7 - len(self.used())
        assert {block: self.pool.key_of(block) for block in range(1, 8)} == {
            b: self.keys.get(b) for b in range(1, 8)
        }
        for key in (b"a", b"b", b"c"):
            found = self.pool.cached_block(key)
            assert found in {block for block, held in self.keys.items() if held == key} | {None}
            assert (found is None) == (key not in self.keys.values())


TestPoolAgainstCounters = PoolAgainstCounters.TestCase
