"""The value of a rank's shard of a block: the bytes of its host slot, and a trailer to verify them.

    |<----------- slot_bytes ----------->|<--------- TRAILER_BYTES --------->|
    | the slot's pages, region by region | magic, length, XXH3, whose it is  |    without a key
    |                                    | magic, length, HMAC-SHA256 of all |    with one

A store's claim to have a value is not trusted: another writer may use our names, a value may be truncated, and a store may confuse values.
A value is used only if its length, checksum and name match. Only a key detects values that were forged.
"""

from __future__ import annotations

import hmac
import re
import secrets
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64, xxh3_128

from kvoffload.model.ids import BlockKey

if TYPE_CHECKING:
    from kvoffload.disk.tier_key import TierKey

FORMAT = "kvo1"
_HEAD = struct.Struct("<4sIQ")  # magic, kind, bytes
_CHECKSUM = struct.Struct("<Q16s")
_MAGIC = FORMAT.encode()
_CHECKED, _AUTHENTICATED = 1, 2
_GENERATION = re.compile(rb"([0-9a-f]{32})( after a reset)?")
_AFTER_RESET = b" after a reset"

TRAILER_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Shard:
    """Names a set of values: whose KV, and which rank's part of each block.

    Args:
        namespace: fingerprint and generation: all that makes KV usable by another engine, and a random value.
        rank, ranks: which part of each block.
    """

    namespace: str
    rank: int
    ranks: int

    @property
    def part(self) -> str:
        """Rank and number of ranks, as they stand in names."""
        return f"{self.rank}of{self.ranks}"

    def name(self, key: BlockKey) -> str:
        """Return the name of a block's value."""
        return f"{FORMAT}/{self.namespace}/{key.hex()}/{self.part}"


def generation_name(fingerprint: str) -> str:
    """Return the name under which the store keeps the generation that engines share."""
    return f"{FORMAT}/{fingerprint}/generation"


class Generation(NamedTuple):
    """The generation that engines share.

    Args:
        name: random, 32 hexadecimal digits.
        is_after_reset: an engine replaced it because it was reset.
        made_ms: when it was made, milliseconds since 1970; 0 without a key.
    """

    name: str
    is_after_reset: bool
    made_ms: int


def new_generation(name: str, key: TierKey | None, after_ms: int, *, is_after_reset: bool = False) -> bytes:
    """Make a generation's value.

    Args:
        name: its name in the store.
        key: authenticates it; None where writers are trusted.
        after_ms: when the previous one was made, by an engine whose clock may be ahead. The new one is later.
        is_after_reset: whether it is made because of a reset.
    """
    text = secrets.token_hex(16).encode() + (_AFTER_RESET if is_after_reset else b"")
    if key is None:
        return text
    made_ms = max(time.time_ns() // 10**6, after_ms + 1)
    dated = text + f" {made_ms}".encode()
    return dated + b" " + _generation_mac(name, key, dated)


def read_generation(name: str, key: TierKey | None, data: bytes) -> Generation | None:
    """Return the generation in a value; None if the value has another form, or is not authentic."""
    made_ms = b"0"
    if key is not None:
        dated, _, mac = data.rpartition(b" ")
        if not hmac.compare_digest(mac, _generation_mac(name, key, dated)):
            return None
        data, _, made_ms = dated.rpartition(b" ")
    found = _GENERATION.fullmatch(data)
    return None if found is None else Generation(found[1].decode(), found[2] is not None, int(made_ms))


def _generation_mac(name: str, key: TierKey, dated: bytes) -> bytes:
    return key.mac(b"generation " + name.encode(), dated).hex().encode()


def seal(value: memoryview, name: str, layout: bytes, key: TierKey | None = None) -> None:
    """Write the trailer behind a slot's bytes.

    Args:
        value: the slot's bytes, and room for the trailer.
        name: the value's.
        layout: 16 bytes, a digest of the layout of the slot's pages.
        key: authenticates it; None for a checksum.
    """
    size = len(value) - TRAILER_BYTES
    value[size:] = _trailer(value[:size], name, layout, key)


def is_whole(value: memoryview, arrived: int, name: str, layout: bytes, key: TierKey | None = None) -> bool:
    """Whether these bytes, of which `arrived` were received, are the value of that name."""
    size = len(value) - TRAILER_BYTES
    return arrived == len(value) and hmac.compare_digest(
        value[size:], _trailer(value[:size], name, layout, key)
    )


def _trailer(data: memoryview, name: str, layout: bytes, key: TierKey | None) -> bytes:
    whose = name.encode() + layout
    if key is not None:
        head = _HEAD.pack(_MAGIC, _AUTHENTICATED, len(data))
        return head + key.mac(b"value " + head + whose, data)[: _CHECKSUM.size]
    checksum = xxh3_64()
    checksum.update(data)  # a streamed hash releases the interpreter's lock
    head = _HEAD.pack(_MAGIC, _CHECKED, len(data))
    return head + _CHECKSUM.pack(checksum.intdigest(), xxh3_128(whose).digest())
