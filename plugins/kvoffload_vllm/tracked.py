"""What the core has been told of each of vLLM's requests, so that only news is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffload.model.ids import BlockKey


class RequestLike(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    skip_reading_prefix_cache: bool


class KeyMaker:
    """Turns a request's block hashes into keys per group.

    Args:
        ratios: per group, hashes in one block; the last of them stands for the block.
        group_ids: per group, vLLM's number of it, which ends its keys.
    """

    def __init__(self, ratios: Sequence[int], group_ids: Sequence[int]) -> None:
        self._groups = [
            (ratio, group.to_bytes(4, "big")) for ratio, group in zip(ratios, group_ids, strict=True)
        ]

    def keys(self, hashes: Sequence[bytes], first: int) -> tuple[tuple[BlockKey, ...], ...]:
        """Return, per group, the keys that the hashes from number `first` on complete."""
        return tuple(
            tuple(
                BlockKey(hashes[(position + 1) * ratio - 1] + suffix)
                for position in range(first // ratio, len(hashes) // ratio)
            )
            for ratio, suffix in self._groups
        )


@dataclass(slots=True)
class Tracked:
    """One request.

    Args:
        request: vLLM's.
        hashes: block hashes told.
        found_tokens: what the device held at the last lookup.
        covered_tokens: tokens that the last block table told was given for.
        boundary: confirmed tokens from which on there is news.
    """

    request: RequestLike
    hashes: int = 0
    found_tokens: int = 0
    boundary: int = 0

    @property
    def confirmed_tokens(self) -> int:
        """Tokens computed for certain: in flight ones that may be rejected are not."""
        return self.request.num_computed_tokens - self.request.num_output_placeholders

    def new_keys(self, maker: KeyMaker) -> tuple[tuple[BlockKey, ...], ...]:
        """Return the keys not told yet, and note them as told."""
        keys = maker.keys(self.request.block_hashes, self.hashes)
        self.hashes = len(self.request.block_hashes)
        return keys
