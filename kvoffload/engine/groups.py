"""Computes which tokens a group's layers attend to, and which blocks a request must hold for them.

    full              [0 ................................ p]
    sliding window                    [p - window + 1 ... p]
    chunked local             [start of p's chunk ....... p]
    recurrent                                      [p - 1]      the state after the token before

Tables, prefix search and masks all use `first_visible` to decide whether a block is still needed.

Pool size, admission and allocation all use the formula in `Capacity`. A step computes at most `step_tokens` new tokens
of a request, and one step is in flight. Blocks that left the window are released before new ones are allocated, so a
request holds at most this many blocks in a window group:

        |<---- window - 1 ---->|<-- in flight -->|
    ....|......:.......:.......:.......:.......:.|        in blocks, rounded up, plus one,
     ^ the window need not start on a block edge           because both ends can lie inside a block

A chunk starts on a block edge, so chunked-local groups need no extra block. Full attention has no limit. A recurrent
group needs two blocks: one for the state from which a step continues, one for the state that it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.engine.errors import PoolTooSmall
from kvoffload.engine.plugin import GroupFacts

if TYPE_CHECKING:
    from kvoffload.engine.config import EngineConfig, ModelConfig

_POOL_REQUESTS = 4  # a default pool has room for this many requests of full length


def make_groups(config: EngineConfig) -> tuple[GroupFacts, ...]:
    """Return the groups of a model. Layer `l` is in group `l % groups`, and its KV is in physical tensor `l // groups`.

    All groups therefore have the same number of layers, and every physical tensor serves one layer of each group.
    Contiguous tensors hold contiguous layers, so they can form a pipeline stage.
    """
    model = config.model
    local = tuple(_local_group(model, index, config.block_tokens) for index in range(model.num_groups - 1))
    return (*local, GroupFacts(model.num_groups - 1, "full", config.block_tokens, None, None))


def first_visible(group: GroupFacts, position: int) -> int:
    """Return the first token that the token at `position` attends to."""
    if group.window_tokens is not None:
        return max(0, position - group.window_tokens + 1)
    if group.kind == "recurrent":
        return max(0, position - 1)
    if group.chunk_tokens is not None:
        return position // group.chunk_tokens * group.chunk_tokens
    return 0


def first_needed_block(group: GroupFacts, computed_tokens: int) -> int:
    """Return the first block position that tokens from `computed_tokens` on can still see."""
    return first_visible(group, computed_tokens) // group.block_tokens


def _local_group(model: ModelConfig, index: int, block_tokens: int) -> GroupFacts:
    return GroupFacts(index, model.attention, block_tokens, model.window_tokens, model.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Computes how many blocks requests can hold, for one engine's groups and limits."""

    groups: tuple[GroupFacts, ...]
    in_flight_tokens: int
    max_model_len: int

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens in a block, which is the same in all groups."""
        return self.groups[0].block_tokens

    def group_blocks(self, group: GroupFacts, tokens: int) -> int:
        """Return the maximum number of blocks that a request of `tokens` tokens holds in `group`."""
        blocks = _blocks(tokens, group)
        cap = self.group_cap_blocks(group)
        return blocks if cap is None else min(blocks, cap)

    def group_cap_blocks(self, group: GroupFacts) -> int | None:
        """Return the maximum number of blocks that any request holds in `group`; None for full attention."""
        if group.kind == "recurrent":
            return 2
        if group.window_tokens is not None:
            tokens = min(group.window_tokens - 1 + self.in_flight_tokens, self.max_model_len)
            return _blocks(tokens, group) + 1
        if group.chunk_tokens is not None:
            return _blocks(min(group.chunk_tokens + self.in_flight_tokens, self.max_model_len), group)
        return None

    def request_blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks that a request of `tokens` tokens holds in all groups together."""
        return sum(self.group_blocks(group, tokens) for group in self.groups)

    def pool_blocks(self, requests: int) -> int:
        """Return the pool size in which `requests` requests of full length fit together, including the null block."""
        return 1 + requests * self.request_blocks(self.max_model_len)

    def check_fits(self, tokens: int, usable_blocks: int) -> None:
        """Refuse a request that can never fit in the pool.

        Raises:
            PoolTooSmall: a request of `tokens` tokens needs more than `usable_blocks` blocks.
        """
        need = self.request_blocks(tokens)
        if need > usable_blocks:
            raise PoolTooSmall(tokens, need, usable_blocks)


def pool_size(config: EngineConfig, capacity: Capacity) -> int:
    """Return the number of blocks of an engine's pool, including the null block."""
    return config.num_blocks or capacity.pool_blocks(_POOL_REQUESTS)


def _blocks(tokens: int, group: GroupFacts) -> int:
    return -(-tokens // group.block_tokens)
