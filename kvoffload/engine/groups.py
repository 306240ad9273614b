"""Which tokens a group's layers can see, and so which blocks a request must hold.

    full              [0 ................................ p]
    sliding window                    [p - window + 1 ... p]
    chunked local             [start of p's chunk ....... p]
    recurrent                                      [p - 1]      the state after the token before

Everything that asks "is this block still needed" (capacity, tables, prefix search, masks) asks `first_visible`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.engine.plugin import GroupFacts

if TYPE_CHECKING:
    from kvoffload.engine.config import EngineConfig, ModelConfig


def make_groups(config: EngineConfig) -> tuple[GroupFacts, ...]:
    """The groups of a model. Layer `l` is in group `l % groups` and lives in physical tensor `l // groups`.

    So the groups have equally many layers, every physical tensor serves one layer of each group, and a contiguous
    run of tensors is a contiguous run of layers: a pipeline stage.
    """
    model = config.model
    local = tuple(_local_group(model, index, config.block_tokens) for index in range(model.num_groups - 1))
    return (*local, GroupFacts(model.num_groups - 1, "full", config.block_tokens, None, None))


def first_visible(group: GroupFacts, position: int) -> int:
    """The first token that the token at `position` attends to."""
    if group.window_tokens is not None:
        return max(0, position - group.window_tokens + 1)
    if group.kind == "recurrent":
        return max(0, position - 1)
    if group.chunk_tokens is not None:
        return position // group.chunk_tokens * group.chunk_tokens
    return 0


def first_needed_block(group: GroupFacts, computed_tokens: int) -> int:
    """The first block position that tokens from `computed_tokens` on can still see."""
    return first_visible(group, computed_tokens) // group.block_tokens


def _local_group(model: ModelConfig, index: int, block_tokens: int) -> GroupFacts:
    return GroupFacts(index, model.attention, block_tokens, model.window_tokens, model.chunk_tokens)
