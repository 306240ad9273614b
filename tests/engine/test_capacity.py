"""R6: one formula sizes the pool, decides admission, and bounds how many blocks a request allocates."""

from __future__ import annotations

import pytest

from kvoffload.engine import EngineConfig, PoolTooSmall, PromptTooLong, SamplingParams
from kvoffload.engine.block_pool import BlockPool
from kvoffload.engine.groups import Capacity, make_groups, pool_size
from kvoffload.engine.plugin import GroupFacts
from kvoffload.engine.request import KeyChain, Request, RequestStats
from kvoffload.engine.tables import BlockTables, PrefixHit
from tests.engine.tiny import drain, run, taken, tiny_config, tiny_engine, tokens

WINDOW = GroupFacts(0, "sliding_window", 16, 1024, None)
CHUNK = GroupFacts(0, "chunked_local", 16, None, 1024)
FULL = GroupFacts(0, "full", 16, None, None)


@pytest.mark.parametrize(
    ("group", "in_flight", "max_len", "blocks"),
    [
        # Window and step have 1535 tokens, and the window may begin inside a block.
        (WINDOW, 512, 100_000, 96 + 1),
        (WINDOW, 513, 100_000, 96 + 1),  # window and step have the tokens of exactly 96 blocks
        (WINDOW, 514, 100_000, 97 + 1),
        (WINDOW, 512, 1024, 64 + 1),  # the model's maximum length is the limit
        (CHUNK, 512, 100_000, 96),  # a chunk always begins at the start of a block
        (CHUNK, 513, 100_000, 97),
        (CHUNK, 512, 1024, 64),
        (FULL, 512, 100_000, None),
    ],
)
def test_the_maximum_number_of_blocks_of_a_request(
    group: GroupFacts, in_flight: int, max_len: int, blocks: int | None
) -> None:
    capacity = Capacity((group,), in_flight, max_len)
    assert capacity.group_cap_blocks(group) == blocks
    assert capacity.request_blocks(100_000) == (blocks or 6250)
    assert capacity.request_blocks(17) == 2  # two blocks are enough for 17 tokens


@pytest.mark.parametrize("span", [1, 2, 5, 8, 12, 16])
@pytest.mark.parametrize("step_tokens", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local"])
def test_allocation_reaches_the_bound_and_never_exceeds_it(kind: str, span: int, step_tokens: int) -> None:
    """Check how many blocks a request holds at most, over all sizes of its first chunk.

    In two cases it is one block less than the bound, because the formula ignores remainders: with a window, if
    window and step together are one token more than whole blocks; with chunks, if a step is.
    """
    if kind == "chunked_local":
        span = -(-span // 4) * 4
    key = "window_tokens" if kind == "sliding_window" else "chunk_tokens"
    config = tiny_config(kind, model={key: span}, step_tokens=step_tokens, max_model_len=128)
    groups = make_groups(config)
    capacity = Capacity(groups, step_tokens, 128)
    most = max(_most_held(groups, first, step_tokens) for first in range(1, step_tokens + 1))
    bound = capacity.group_cap_blocks(groups[0])
    assert bound is not None
    odd_tokens = span - 1 + step_tokens if kind == "sliding_window" else step_tokens
    slack = 1 if odd_tokens % 4 == 1 else 0
    assert most == bound - slack


def _most_held(groups: tuple[GroupFacts, ...], first: int, step_tokens: int) -> int:
    """Return how many blocks of group 0 a request of 100 tokens holds at most, if its first step has `first`."""
    pool = BlockPool(200)
    tables = BlockTables(pool, groups)
    request = Request("r", tokens(100), 100, SamplingParams(1), KeyChain(4, 3), RequestStats(100, 0.0), 3)
    assert tables.admit(request, PrefixHit(0, ((), (), ())), 0, first, reserve=0)
    most, end = sum(map(bool, request.tables[0])), first
    while end < 100:
        request.confirmed_tokens, end = end, min(100, end + step_tokens)
        assert tables.grow(request, end) is not None
        most = max(most, sum(map(bool, request.tables[0])))
    tables.release(request)
    assert pool.free_blocks == pool.usable_blocks
    return most


def test_without_num_blocks_the_pool_is_sized_for_requests_of_full_length() -> None:
    config = tiny_config("sliding_window", num_blocks=None)
    capacity = Capacity(make_groups(config), config.step_tokens, config.max_model_len)
    # 128 tokens need 32 blocks in the full group. Each of the two window groups needs 6 + 1 blocks, for 7 - 1
    # + 16 = 22 tokens.
    assert capacity.request_blocks(128) == 32 + 2 * 7
    assert pool_size(config, capacity) == 1 + 4 * 46
    usual = EngineConfig()
    capacity = Capacity(make_groups(usual), usual.step_tokens, usual.max_model_len)
    assert pool_size(usual, capacity) == 1 + 4 * 256


@pytest.mark.parametrize(("kind", "need"), [("sliding_window", 31 + 2 * 7), ("chunked_local", 31 + 2 * 6)])
def test_a_long_prompt_on_a_windowed_model_is_admitted_within_the_bound(kind: str, need: int) -> None:
    # without windows, the three groups would need 93 blocks
    assert len(run(tiny_engine(kind, num_blocks=need + 1), tokens(120), 4)) == 4
    engine, few = tiny_engine(kind, num_blocks=need), f"needs {need} KV blocks .* pool has {need - 1}"
    with pytest.raises(PoolTooSmall, match=f"{few}: raise num_blocks to at least {need + 1}"):
        engine.submit(tokens(120), SamplingParams(4))
    assert not engine.has_work
    with pytest.raises(
        PromptTooLong, match="120 tokens and asks for 9 new ones, together 129; max_model_len is 128"
    ):
        engine.submit(tokens(120), SamplingParams(9))


def test_a_prompt_too_large_for_a_full_attention_pool_is_refused_at_once() -> None:
    engine = tiny_engine(num_blocks=11)
    with pytest.raises(PoolTooSmall, match=r"needs 11 KV blocks .* pool has 10: .* 12 .*shorten the prompt"):
        engine.submit(tokens(40), SamplingParams(2))
    # With one new token this prompt fits: the KV of a request's last token is not computed.
    stream = engine.submit(tokens(40), SamplingParams(1))
    drain(engine)
    assert len(taken(stream)) == 1
