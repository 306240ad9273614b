"""KV cache groups: layers that share a block table and an attention kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvoffload.model.errors import ConfigError
from kvoffload.model.ids import GroupId


class AttentionKind(Enum):
    """The attention kinds. They differ in which earlier tokens a layer reads."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group.

    Args:
        group: the group's number, which is also its index in every per-group tuple.
        kind: the attention kind of the group's layers.
        block_tokens: tokens in one block of the group.
        reach_tokens: the size of the window or chunk in tokens, including the query token; None for other kinds.
        has_lookahead: True if a draft model reads one block past a hit, so that the last matched block must be recomputed.
        key_number: the number that the group's keys end with; by default `group`.
    """

    group: GroupId
    kind: AttentionKind
    block_tokens: int
    reach_tokens: int | None = None
    has_lookahead: bool = False
    key_number: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.block_tokens < 1:
            problems.append(f"block_tokens is {self.block_tokens}; it must be at least 1")
        bounded = self.kind in (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)
        fits = (self.reach_tokens or 0) >= 1 if bounded else self.reach_tokens is None
        if not fits:
            allowed = "at least 1" if bounded else "None"
            problems.append(
                f"reach_tokens is {self.reach_tokens} for {self.kind.value} attention; it must be {allowed}"
            )
        if problems:
            raise ConfigError([f"group {self.group}: {problem}" for problem in problems])

    @property
    def key_end(self) -> bytes:
        """Return the bytes that all keys of the group end with."""
        return (self.group if self.key_number is None else self.key_number).to_bytes(4, "big")

    @property
    def recycles_blocks(self) -> bool:
        """Return whether the engine frees blocks of the group while their request runs."""
        return self.kind is not AttentionKind.FULL

    def first_needed_token(self, length: int) -> int:
        """Return the first token whose KV the token at position `length` reads.

        sliding window 4, length 10        chunks of 4, length 10
        0 1 2 3 4 5 6 [7 8 9] 10           0 1 2 3 | 4 5 6 7 | [8 9] 10
        """
        if self.kind is AttentionKind.FULL:
            return 0
        if self.kind is AttentionKind.RECURRENT:
            return max(length - 1, 0)
        reach = self.reach_tokens or 1
        if self.kind is AttentionKind.SLIDING_WINDOW:
            return max(length - reach + 1, 0)
        return length - length % reach
