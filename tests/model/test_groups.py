from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.model.engine import EngineShape
from kvoffload.model.errors import ConfigError, EngineContractError
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId
from tests.core.world import needed_blocks

FULL, WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW
CHUNKED, RECURRENT = AttentionKind.CHUNKED_LOCAL, AttentionKind.RECURRENT


def reads(kind: AttentionKind, reach: int, token: int, other: int) -> bool:
    """Return whether the token's attention reads the KV of `other`."""
    if kind is FULL:
        return True
    if kind is WINDOW:
        return token - other < reach
    if kind is CHUNKED:
        return token // reach == other // reach
    return other == token - 1


@given(
    kind=st.sampled_from(AttentionKind),
    reach=st.integers(1, 20),
    size=st.integers(1, 7),
    length=st.integers(0, 60),
)
def test_the_needed_blocks_are_those_that_attention_reads(
    kind: AttentionKind, reach: int, size: int, length: int
) -> None:
    bounded = kind in (WINDOW, CHUNKED)
    group = GroupSpec(GroupId(0), kind, size, reach if bounded else None)
    read = [other for other in range(length) if reads(kind, reach, length, other)]
    assert group.first_needed_token(length) == (read[0] if read else length)
    whole = length // size * size
    assert (
        list(needed_blocks(group, length)) == sorted({token // size for token in read if token < whole})
        or not read
    )


@pytest.mark.parametrize(
    ("kind", "size", "reach", "problem"),
    [
        (FULL, 0, None, "block_tokens is 0; it must be at least 1"),
        (FULL, 4, 8, "reach_tokens is 8 for full attention; it must be None"),
        (FULL, 4, 0, "reach_tokens is 0 for full attention; it must be None"),
        (RECURRENT, 4, 1, "reach_tokens is 1 for recurrent attention; it must be None"),
        (WINDOW, 4, None, "reach_tokens is None for sliding_window attention; it must be at least 1"),
        (WINDOW, 4, 0, "reach_tokens is 0 for sliding_window attention; it must be at least 1"),
        (CHUNKED, 4, -1, "reach_tokens is -1 for chunked_local attention; it must be at least 1"),
    ],
)
def test_an_impossible_group_is_refused(
    kind: AttentionKind, size: int, reach: int | None, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        GroupSpec(GroupId(3), kind, size, reach)
    assert caught.value.problems == (f"group 3: {problem}",)


def test_the_error_of_an_impossible_group_lists_all_problems() -> None:
    with pytest.raises(ConfigError, match=r"block_tokens is 0; .*; group 0: reach_tokens is 0"):
        GroupSpec(GroupId(0), WINDOW, 0, 0)


def test_only_full_attention_keeps_its_blocks() -> None:
    assert not GroupSpec(GroupId(0), FULL, 1).recycles_blocks
    assert GroupSpec(GroupId(0), WINDOW, 1, 1).recycles_blocks


def shape(*sizes: int, **options: int) -> EngineShape:
    groups = tuple(GroupSpec(GroupId(number), FULL, size) for number, size in enumerate(sizes))
    numbers = {"ranks": 1, "device_blocks": 64, "step_tokens": 16, **options}
    return EngineShape(groups, **numbers)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_hits_end_where_blocks_of_every_group_end(sizes: list[int]) -> None:
    assert shape(*sizes).alignment == math.lcm(*sizes)


def test_an_engine_may_require_a_coarser_alignment_of_hits() -> None:
    assert shape(4, match_tokens=12).alignment == 12


@pytest.mark.parametrize(("blocks", "limit"), [(64, 16), (63, 15), (4, 1), (3, 1), (1, 1)])
def test_stores_may_lease_a_quarter_of_the_device_blocks(blocks: int, limit: int) -> None:
    assert shape(4, device_blocks=blocks).lease_limit == limit


def test_the_maximum_number_of_blocks_that_a_step_allocates() -> None:
    assert shape(4, 8).turnover_blocks == 5 + 3
    assert shape(5).turnover_blocks == 5


@pytest.mark.parametrize(
    ("tokens", "options", "blocks"),
    [
        # full attention, a window of 5 tokens, a chunk of 8 tokens, and a recurrent state; blocks of 4 tokens
        (33, {}, (9, 4, 5, 2)),
        (33, {"draft_tokens": 4}, (10, 4, 5, 6)),
        (33, {"in_flight_tokens": 16}, (9, 6, 7, 2)),
        (9, {"in_flight_tokens": 16}, (3, 3, 3, 2)),
        (4, {}, (1, 1, 1, 1)),
    ],
)
def test_r19_the_maximum_number_of_blocks_of_a_request(
    tokens: int, options: dict[str, Any], blocks: tuple[int, ...]
) -> None:
    kinds = (FULL, None), (WINDOW, 5), (CHUNKED, 8), (RECURRENT, None)
    groups = tuple(GroupSpec(GroupId(number), kind, 4, reach) for number, (kind, reach) in enumerate(kinds))
    for group, most in zip(groups, blocks, strict=True):
        alone = EngineShape((replace(group, group=GroupId(0)),), 1, 64, step_tokens=8, **options)
        assert alone.request_blocks(tokens) == most
    assert EngineShape(groups, 1, 64, step_tokens=8, **options).request_blocks(tokens) == sum(blocks)


def test_the_error_of_an_impossible_shape_lists_all_problems() -> None:
    group = GroupSpec(GroupId(1), FULL, 4)
    with pytest.raises(EngineContractError, match=r"numbered.*0 ranks.*match_tokens is 6"):
        EngineShape((group,), 0, 8, 8, match_tokens=6)
    with pytest.raises(EngineContractError, match="numbered"):
        EngineShape((), 1, 8, 8)
