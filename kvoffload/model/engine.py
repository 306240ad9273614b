"""What an engine is, as far as the decisions care: its shape, and what it promises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvoffload.model.errors import EngineContractError
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId


@dataclass(frozen=True, slots=True)
class Promises:
    """What the engine promises (the adapter contract's flags).

    Args:
        can_wait: a lookup may answer "not yet".
        recovers_loads: the engine recomputes what a failed load should have brought.
        hands_off_states: recurrent states are offered block by block.
    """

    can_wait: bool = True
    recovers_loads: bool = True
    hands_off_states: bool = False


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The engine's fixed facts.

    Args:
        groups: the KV cache groups, in the order of every per-group tuple.
        ranks: workers, each with its shard of every block.
        device_blocks: blocks in the device's pool.
        step_tokens: tokens that one step may compute.
        match_tokens: hits must be a multiple of this many tokens; by default the least common multiple of the
            groups' block sizes.
        promises: what the engine promises.
    """

    groups: tuple[GroupSpec, ...]
    ranks: int
    device_blocks: int
    step_tokens: int
    match_tokens: int = 0
    promises: Promises = field(default_factory=Promises)
    alignment: int = field(init=False, repr=False, compare=False)
    """Tokens that a hit's length is a multiple of. Worked out once, as the next: every lookup asks."""
    is_one_full_group: bool = field(init=False, repr=False, compare=False)
    """Whether any block of the one group, of full attention, can end a hit: what most models have."""

    def __post_init__(self) -> None:
        problems = []
        if [group.group for group in self.groups] != list(range(len(self.groups))) or not self.groups:
            problems.append("the groups must be numbered by their places, from 0 on")
        if self.ranks < 1:
            problems.append(f"there are {self.ranks} ranks; at least 1 copies")
        if any(self.match_tokens % group.block_tokens for group in self.groups):
            problems.append(
                f"match_tokens is {self.match_tokens}, not a multiple of every group's block_tokens"
            )
        if problems:
            raise EngineContractError("; ".join(problems))
        alignment = self.match_tokens or math.lcm(*(group.block_tokens for group in self.groups))
        object.__setattr__(self, "alignment", alignment)
        object.__setattr__(self, "is_one_full_group", _is_one_full_group(self.groups, alignment))

    @property
    def lease_limit(self) -> int:
        """Device blocks that stores may lease at once: a quarter of the pool, so that allocation never starves."""
        return max(self.device_blocks // 4, 1)

    @property
    def stall_limit(self) -> int:
        """Device blocks that may be under copies that were abandoned, if these are several: an eighth of the pool."""
        return self.device_blocks // 8

    @property
    def turnover_blocks(self) -> int:
        """Device blocks that one step hands out to one request at most, and to all of them as a rule."""
        return sum(-(-self.step_tokens // group.block_tokens) + 1 for group in self.groups)


@runtime_checkable
class AuditsLeases(Protocol):
    """What a device may do beyond lending, where the engine's reference counts can be read."""

    def lease_problems(self, leases: Mapping[DeviceBlockId, int]) -> list[str]:
        """Return where the engine's own counts contradict ours: each block, and how often it is leased. Reads only."""


class BlockPool(Protocol):
    """The engine's pool of device blocks. Every call is answered at once and never blocks."""

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Keep these blocks from being handed out again. Changes the engine's reference counts."""

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        """Give leased blocks back, those first that may be handed out again first. Changes reference counts."""

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        """Return up to `count` blocks, the next one to be handed out first. Reads only."""

    def free_blocks(self) -> int:
        """Return how many blocks could be handed out now. Reads only."""

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> Sequence[BlockKey | None]:
        """Return the key of what each block holds, None where the engine does not know it. Reads only."""

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        """Return a block that the device's own index holds for the key, None without one. Reads only."""


def _is_one_full_group(groups: Sequence[GroupSpec], alignment: int) -> bool:
    group = groups[0]
    is_plain = group.kind is AttentionKind.FULL and not group.reads_ahead
    return len(groups) == 1 and is_plain and alignment == group.block_tokens
