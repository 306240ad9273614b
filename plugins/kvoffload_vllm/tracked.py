"""What the core knows of each of vLLM's requests, so that it is given only what is new. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import add
from typing import Any, Protocol

from msgspec import Struct

from kvoffload.model.ids import BlockKey, RequestId


class RequestLike(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: RequestId
    block_hashes: list[bytes]
    all_token_ids: Sequence[int]
    lora_request: Any
    mm_features: Any
    num_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_output_tokens: int
    skip_reading_prefix_cache: bool


class KeyMaker:
    """Turns a request's block hashes into keys per group.

    Args:
        ratios: per group, hashes in one block; the last of them stands for the block.
        group_ids: per group, vLLM's number of it, which ends its keys.
    """

    def __init__(self, ratios: Sequence[int], group_ids: Sequence[int]) -> None:
        self._suffixes = [group.to_bytes(4, "big") for group in group_ids]
        self._groups = list(zip(ratios, self._suffixes, strict=True))
        self._has_one_hash_a_block = set(ratios) == {1}

    def keys(self, hashes: Sequence[bytes], first: int) -> tuple[tuple[BlockKey, ...], ...]:
        """Return, per group, the keys that the hashes from number `first` on complete."""
        # Most blocks of a decoding request come alone.
        if self._has_one_hash_a_block and len(hashes) - first == 1:
            alone = [(hashes[first] + suffix,) for suffix in self._suffixes]
            return tuple(alone)  # type: ignore[arg-type]  # a `BlockKey` of its own would be a call a key
        keys: list[tuple[bytes, ...]] = []
        for ratio, suffix in self._groups:
            ends = hashes[first:] if ratio == 1 else hashes[(first // ratio + 1) * ratio - 1 :: ratio]
            keys.append(tuple(map(add, ends, repeat(suffix))))
        return tuple(keys)  # type: ignore[arg-type]  # a `BlockKey` of its own would be a call a key


class Tracked(Struct, eq=False):
    """One request.

    Args:
        request: vLLM's.
        hashes: block hashes reported so far.
        last_hash: the last of them. It covers the others, so it changes if any of them was rewritten.
        noted: block hashes noted for events, of the table that the request has now.
        found_tokens: what the device held at the last lookup.
        boundary: confirmed tokens from which on there is something new to report; 0 before the first report on its table.
        due: the step in which it is looked at again, 0 for none; `DueSteps` writes it.
    """

    request: RequestLike
    hashes: int = 0
    last_hash: bytes | None = None
    noted: int = 0
    found_tokens: int = 0
    boundary: int = 0
    due: int = 0

    @property
    def trace_parent(self) -> str | None:
        """The caller's W3C `traceparent`; vLLM passes it on where it traces itself (`--otlp-traces-endpoint`)."""
        headers = getattr(self.request, "trace_headers", None)
        return headers.get("traceparent") if headers else None

    @property
    def is_rewritten(self) -> bool:
        """Whether reported hashes are no longer the request's: a session's next input replaces tokens not yet computed."""
        hashes, sent = self.request.block_hashes, self.hashes
        return sent > 0 and (len(hashes) < sent or hashes[sent - 1] != self.last_hash)

    def new_keys(self, maker: KeyMaker) -> tuple[tuple[BlockKey, ...], ...]:
        """Return the keys not reported yet, and note them as reported."""
        if self.hashes and self.hashes == len(self.request.block_hashes):
            return ()
        hashes = self.request.block_hashes
        keys = maker.keys(hashes, self.hashes)
        self.hashes = len(hashes)
        self.last_hash = hashes[-1] if hashes else None
        return keys
