"""Block keys: a hash chain over tokens, so that equal keys mean equal prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


class KeyChain:
    """The keys of one request's full blocks; grows with its tokens.

    A block's hash covers its tokens, the hash of the block before it, and, through the first block, the cache salt.
    Its key is that hash followed by the group's number in four big-endian bytes.
    """

    def __init__(self, block_tokens: int, groups: int, cache_salt: bytes = b"") -> None:
        self._block_tokens = block_tokens
        self._last_hash = sha256(b"kv-block-chain:" + cache_salt).digest()
        self._keys: tuple[list[bytes], ...] = tuple([] for _ in range(groups))

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the blocks of `tokens` (all of the request's tokens) that have become full."""
        size = self._block_tokens
        for start in range(len(self._keys[0]) * size, len(tokens) - size + 1, size):
            self._append(tokens[start : start + size])

    def keys(self, group: int) -> Sequence[bytes]:
        """Keys of the full blocks hashed so far, by position."""
        return self._keys[group]

    def _append(self, block: Sequence[int]) -> None:
        # Eight bytes a token: the widest an array takes, so two different blocks never have the same bytes.
        self._last_hash = sha256(self._last_hash + array("q", block).tobytes()).digest()
        for group, keys in enumerate(self._keys):
            keys.append(self._last_hash + group.to_bytes(4, "big"))
