"""The core's description of an engine: its shape, its promises and its block pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from kvoffload.model.errors import EngineContractError
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId


@dataclass(frozen=True, slots=True)
class Promises:
    """An engine's promises: the flags of the adapter contract.

    Args:
        can_wait: a lookup may answer "not yet", after which the engine looks up again later.
        recovers_loads: the engine recomputes the tokens of a failed load.
        hands_off_states: the engine reports in each step the recurrent states that the step completes.
    """

    can_wait: bool = True
    recovers_loads: bool = True
    hands_off_states: bool = False


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Names the engine in logs and metrics. No decision depends on the names.

    Args:
        name: the engine's name.
        version: the engine's version.
        model: the model's path or name, as passed to the engine.
        index: the engine's number in its data-parallel server, from 0.
    """

    name: str = "unknown"
    version: str = "unknown"
    model: str = "unknown"
    index: int = 0


@dataclass(frozen=True)
class EngineShape:
    """The engine's fixed properties.

    Args:
        groups: the KV cache groups, in the order of every per-group tuple.
        ranks: the number of workers; each has its own shard of every block.
        sharers: how many ranks, with consecutive numbers on the same machine, have the same shard and share one copy of it
            on the host and on lower tiers.
        device_blocks: the number of blocks in the device's pool.
        step_tokens: the maximum number of tokens that one step computes.
        in_flight_tokens: the maximum number of tokens that all steps in flight compute; 0 stands for `step_tokens`.
        draft_tokens: for how many tokens after the last one the engine allocates space for a draft model.
        match_tokens: every hit's length is a multiple of this many tokens; 0 stands for the least common multiple of
            the groups' block sizes.
        tail_tokens: a hit may also end inside a block, after a multiple of this many tokens; 0 if it may not. The blocks
            that such a hit ends in are a *tail*. A prompt has one key for each of these lengths (`RequestSeen.hashes`).
        promises: the engine's promises.
    """

    groups: tuple[GroupSpec, ...]
    ranks: int
    device_blocks: int
    step_tokens: int
    match_tokens: int = 0
    in_flight_tokens: int = 0
    draft_tokens: int = 0
    tail_tokens: int = 0
    promises: Promises = field(default_factory=Promises)
    sharers: int = 1

    def __post_init__(self) -> None:
        problems = []
        if [group.group for group in self.groups] != list(range(len(self.groups))) or not self.groups:
            problems.append("the groups must be numbered in order, from 0")
        if self.ranks < 1:
            problems.append(f"there are {self.ranks} ranks; there must be at least 1")
        elif self.sharers < 1 or self.ranks % self.sharers:
            problems.append(f"{self.sharers} ranks share a copy, which must divide the {self.ranks} ranks")
        if any(self.match_tokens % group.block_tokens for group in self.groups):
            problems.append(
                f"match_tokens is {self.match_tokens}, not a multiple of every group's block_tokens"
            )
        if self.tail_tokens and not self._has_tails:
            problems.append(
                f"tail_tokens is {self.tail_tokens}; it needs full attention and recurrent groups, with equal "
                "blocks of a multiple of that, and no lookahead"
            )
        if problems:
            raise EngineContractError("; ".join(problems))

    @property
    def _has_tails(self) -> bool:
        sizes = {group.block_tokens for group in self.groups} | {self.alignment}
        kinds = {group.kind for group in self.groups}
        ahead = any(group.has_lookahead for group in self.groups)
        is_divided = len(sizes) == 1 and not min(sizes) % self.tail_tokens
        return is_divided and kinds == {AttentionKind.FULL, AttentionKind.RECURRENT} and not ahead

    @cached_property
    def alignment(self) -> int:
        """Return the alignment of hits in tokens: every hit's length is a multiple, unless the hit ends in a tail."""
        return self.match_tokens or math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def is_one_full_group(self) -> bool:
        """Return whether the model has a single full-attention group, in which a hit can end after any block."""
        group = self.groups[0]
        is_plain = group.kind is AttentionKind.FULL and not group.has_lookahead
        return len(self.groups) == 1 and is_plain and self.alignment == group.block_tokens

    @cached_property
    def is_full_only(self) -> bool:
        """Return whether all groups have full attention."""
        return all(group.kind is AttentionKind.FULL for group in self.groups)

    @cached_property
    def block_tokens(self) -> int:
        """Return the tokens per block if all groups have equal blocks and none is recurrent, else 0."""
        sizes = {group.block_tokens for group in self.groups}
        return 0 if self.state_key_ends or len(sizes) > 1 else min(sizes)

    @cached_property
    def state_key_ends(self) -> frozenset[bytes]:
        """Return the endings by which the keys of recurrent states are recognized, one per recurrent group."""
        return frozenset(group.key_end for group in self.groups if group.kind is AttentionKind.RECURRENT)

    @property
    def lease_limit(self) -> int:
        """Return how many device blocks open stores may lease together: a quarter of the pool."""
        return max(self.device_blocks // 4, 1)

    @property
    def stall_limit(self) -> int:
        """Return how many device blocks abandoned copies may lease together: an eighth of the pool."""
        return self.device_blocks // 8

    @property
    def turnover_blocks(self) -> int:
        """Return the maximum number of device blocks that a step allocates to one request.

        A step rarely allocates more blocks to all of its requests together.
        """
        return sum(self._turnover_of(group) for group in self.groups)

    def _turnover_of(self, group: GroupSpec) -> int:
        blocks = -(-self.step_tokens // group.block_tokens) + 1
        return self._states_of(blocks) if group.kind is AttentionKind.RECURRENT else blocks

    def _states_of(self, blocks: int) -> int:
        """Return how many blocks a recurrent group needs: for the running state, for a state to keep, and for a tail."""
        return min(blocks, 2) + bool(self.tail_tokens)

    def request_blocks(self, tokens: int) -> int:
        """Return the maximum number of device blocks that a request needs before its first new token (R6, R19)."""
        return sum([self._most_blocks(group, tokens + self.draft_tokens) for group in self.groups])

    def _most_blocks(self, group: GroupSpec, tokens: int) -> int:
        blocks = -(-tokens // group.block_tokens)
        if group.kind is AttentionKind.RECURRENT:
            return self._states_of(blocks) + self.draft_tokens
        if group.reach_tokens is None:
            return blocks
        seen = group.reach_tokens - 1 + (self.in_flight_tokens or self.step_tokens)
        return min(blocks, -(-seen // group.block_tokens) + 1)  # a window can begin inside a block

    def tail_key(self, group: GroupSpec, hashes: Sequence[bytes], tokens: int) -> BlockKey | None:
        """Return the key of a group's block in the tail of a prompt's first `tokens` tokens; None if it has no key.

        Args:
            group: the group.
            hashes: the prompt's hashes (`RequestSeen.hashes`).
            tokens: the length of a hit. The key stands for exactly so many tokens, so it is never a whole block's key.
        """
        if not self.tail_tokens or tokens % self.tail_tokens or not tokens % group.block_tokens:
            return None
        number = tokens // self.tail_tokens
        return BlockKey(hashes[number - 1] + group.key_end) if number <= len(hashes) else None

    def count_states(self, keys: Iterable[BlockKey | None]) -> int:
        """Return how many of these keys belong to recurrent states."""
        ends = self.state_key_ends
        return sum([key is not None and key[-4:] in ends for key in keys]) if ends else 0


@runtime_checkable
class AuditsLeases(Protocol):
    """Optional methods of a block pool, for audits."""

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """Return one line for each block whose reference count in the engine contradicts its number of leases."""


class BlockPool(Protocol):
    """The engine's pool of device blocks. No method waits."""

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Keep the engine from reusing these blocks. Changes the engine's reference counts."""

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Return leased blocks to the engine, which may reuse them in this order. Changes reference counts."""

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        """Return up to `count` free blocks in the order in which the engine will reuse them. Reads only."""

    def free_blocks(self) -> int:
        """Return the number of free blocks. Reads only."""

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> Sequence[BlockKey | None]:
        """Return the key of each block's contents, or None for a block whose key the engine does not know.

        Reads only.
        """

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        """Return the block that the engine's prefix cache has for this key, or None. Reads only."""
