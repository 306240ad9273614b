"""Who says what, in which turn, and what of it a cache could know."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.cli.demo.conversations import (
    Conversation,
    UnlimitedCache,
    make_conversations,
)
from kvoffload.cli.demo.options import DemoOptions

OPTIONS = DemoOptions(conversations=3, turns=3, first_tokens=4, turn_tokens=2, answer_tokens=1)


def test_text_is_cut_into_messages() -> None:
    found = make_conversations(bytes(range(24)), OPTIONS)
    assert sorted(found, key=lambda one: one.messages) == [
        Conversation((bytes(range(n, n + 4)), bytes([n + 4, n + 5]), bytes([n + 6, n + 7])))
        for n in (0, 8, 16)
    ]


def test_the_seed_decides_who_gets_what() -> None:
    orders = {tuple(make_conversations(bytes(range(24)), replace(OPTIONS, seed=seed))) for seed in range(8)}
    assert len(orders) > 1
    assert make_conversations(bytes(24), OPTIONS) == make_conversations(bytes(24), OPTIONS)


def test_one_turn_only() -> None:
    (only,) = make_conversations(b"abcd", replace(OPTIONS, conversations=1, turns=1))
    assert only.messages == (b"abcd",)


def test_a_prompt_is_all_that_was_said_and_a_new_message() -> None:
    conversation = Conversation((b"ab", b"c", b"d"))
    assert conversation.prompt([]) == [97, 98]
    assert conversation.prompt([[1, 2]]) == [97, 98, 1, 2, 99]
    assert conversation.prompt([[1, 2], [3]]) == [97, 98, 1, 2, 99, 3, 100]


def test_whole_blocks_are_reusable_and_one_token_is_left() -> None:
    cache = UnlimitedCache(4)
    assert cache.reusable_tokens(range(9)) == 0
    cache.add(range(9))
    assert [cache.reusable_tokens(range(n)) for n in (1, 4, 5, 8, 9, 12)] == [0, 0, 4, 4, 8, 8]


def test_a_block_is_known_only_behind_the_same_beginning() -> None:
    cache = UnlimitedCache(2)
    cache.add([1, 1, 2, 2])
    assert cache.reusable_tokens([3, 3, 2, 2, 0]) == 0
    assert cache.reusable_tokens([1, 1, 2, 2, 0]) == 4


@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=6),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    size=st.integers(1, 4),
)
def test_it_finds_the_longest_common_beginning(texts: list[list[int]], prompt: list[int], size: int) -> None:
    cache = UnlimitedCache(size)
    for text in texts:
        cache.add(text)
    lengths = range(0, len(prompt), size)  # the whole prompt is not among them
    known = [n for n in lengths if any(text[:n] == prompt[:n] for text in texts) or n == 0]
    assert cache.reusable_tokens(prompt) == max(known)
