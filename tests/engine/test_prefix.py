from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.engine.block_pool import BlockPool
from kvoffload.engine.groups import first_needed_block
from kvoffload.engine.plugin import GroupFacts
from kvoffload.engine.request import KeyChain
from kvoffload.engine.tables import find_prefix


def chain(tokens: list[int], groups: int = 2) -> KeyChain:
    made = KeyChain(2, groups)
    made.extend(tokens)
    return made


def test_a_key_is_the_blocks_hash_and_the_groups_number() -> None:
    keys = chain([1, 2, 3, 4, 5])
    assert len(keys.keys(0)) == 2
    assert keys.keys(0)[0][:-4] == keys.keys(1)[0][:-4]
    assert keys.keys(1)[0][-4:] == b"\x00\x00\x00\x01"


def test_equal_keys_mean_equal_prefixes() -> None:
    base = chain([1, 2, 3, 4])
    assert chain([1, 2, 3, 4, 9]).keys(0)[:2] == list(base.keys(0))
    assert chain([1, 9, 3, 4]).keys(0)[1] != base.keys(0)[1]
    assert chain([1, 2, 1, 2]).keys(0)[0] != chain([1, 2, 1, 2]).keys(0)[1]


def test_a_chain_that_grows_token_by_token_has_the_same_keys() -> None:
    grown = KeyChain(2, 1)
    known: list[int] = []
    for token in [5, 6, 7, 8, 9]:
        known.append(token)
        grown.extend(known)
    assert list(grown.keys(0)) == list(chain([5, 6, 7, 8, 9], 1).keys(0))


GROUPS = (
    GroupFacts(0, "sliding_window", 2, 5, None),
    GroupFacts(1, "chunked_local", 2, None, 6),
    GroupFacts(2, "full", 2, None, None),
)


# Whole chunks shorten the prefix to 6 blocks, and then the window lacks blocks.
@example(cached=[{2, 3, 6, 7}, {3}, set(range(8))], most=8)
@given(cached=st.lists(st.sets(st.integers(0, 7)), min_size=3, max_size=3), most=st.integers(0, 8))
def test_the_hit_is_the_longest_prefix_that_every_group_can_serve(cached: list[set[int]], most: int) -> None:
    keys = [[b"%d:%d" % (group, position) for position in range(8)] for group in range(3)]
    pool = BlockPool(30)
    for group, positions in enumerate(cached):
        for position, block in zip(sorted(positions), pool.allocate(len(positions)), strict=True):
            pool.index(block, keys[group][position])
    hit = find_prefix(pool, GROUPS, keys, most)
    assert hit.blocks == max(length for length in range(most + 1) if _serves(cached, length))
    for facts, table in zip(GROUPS, hit.tables, strict=True):
        first = first_needed_block(facts, hit.blocks * 2)
        assert [pool.key_of(block) for block in table[first:]] == keys[facts.index][first : hit.blocks]
        assert table[:first] == (0,) * first


def _serves(cached: list[set[int]], length: int) -> bool:
    end = length * 2
    read = range(max(0, end - 4), end), range(end // 6 * 6, end), range(end)
    return all({token // 2 for token in tokens} <= held for tokens, held in zip(read, cached, strict=True))
