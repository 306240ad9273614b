"""The value of one rank's shard of a block: the bytes of its host slot, and a trailer to verify them.

    |<----------- slot_bytes ----------->|<---------------- TRAILER_BYTES ---------------->|
    | the slot's pages, region by region | magic, length, XXH3, hash of name and layout    |    without a key
    |                                    | magic, length, HMAC-SHA256 with name and layout |    with a key

Stores are not trusted: another writer may use the same names, a value may be truncated, and a store may confuse
values. A value is used only if its length, checksum and name match. Forged values are detected only with a
key.
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
_HEAD = struct.Struct("<4sIQ")  # magic, kind, length of the slot's bytes
_CHECKSUM = struct.Struct("<Q16s")
_MAGIC = FORMAT.encode()
_CHECKED, _AUTHENTICATED = 1, 2
_GENERATION = re.compile(rb"([0-9a-f]{32})( after a reset)?")
_AFTER_RESET = b" after a reset"

TRAILER_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Shard:
    """The set of values of one rank in one namespace.

    Args:
        namespace: fingerprint of the KV's identity, and generation, a random value that a reset replaces.
        rank, ranks: the rank that the values belong to, and the number of ranks.
    """

    namespace: str
    rank: int
    ranks: int

    @property
    def part(self) -> str:
        """Rank and number of ranks, as used in names."""
        return f"{self.rank}of{self.ranks}"

    def name(self, key: BlockKey) -> str:
        return f"{FORMAT}/{self.namespace}/{key.hex()}/{self.part}"


def generation_name(fingerprint: str) -> str:
    """Return the store's name for the generation that engines share."""
    return f"{FORMAT}/{fingerprint}/generation"


class Generation(NamedTuple):
    """The generation that engines share.

    Args:
        name: 32 random hexadecimal digits.
        is_after_reset: whether it was made because an engine was reset.
        made_ms: when it was made, in milliseconds since 1970; 0 without a key.
    """

    name: str
    is_after_reset: bool
    made_ms: int


def new_generation(name: str, key: TierKey | None, after_ms: int, *, is_after_reset: bool = False) -> bytes:
    """Return the value of a new random generation.

    Args:
        name: the store's name for the generation, from `generation_name`.
        key: authenticates the generation; None if all writers are trusted.
        after_ms: when the previous generation was made, in milliseconds since 1970. The new generation gets a later
            time, even if this engine's clock is behind.
        is_after_reset: whether the generation is made because of a reset.
    """
    text = secrets.token_hex(16).encode() + (_AFTER_RESET if is_after_reset else b"")
    if key is None:
        return text
    made_ms = max(time.time_ns() // 10**6, after_ms + 1)
    dated = text + f" {made_ms}".encode()
    return dated + b" " + _generation_mac(name, key, dated)


def read_generation(name: str, key: TierKey | None, data: bytes) -> Generation | None:
    """Return the generation in a value; None if the value has another form or is not authentic."""
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
    """Write the trailer after a slot's bytes.

    Args:
        value: the slot's bytes, and room for the trailer.
        name: the value's name.
        layout: 16-byte digest of the layout of the slot's pages.
        key: authenticates the value; None for a checksum.
    """
    size = len(value) - TRAILER_BYTES
    value[size:] = _trailer(value[:size], name, layout, key)


def is_whole(value: memoryview, arrived: int, name: str, layout: bytes, key: TierKey | None = None) -> bool:
    """Return whether all bytes arrived (`arrived` counts them) and match the trailer, the name and the layout."""
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
    checksum.update(data)  # a streamed hash releases the GIL
    head = _HEAD.pack(_MAGIC, _CHECKED, len(data))
    return head + _CHECKSUM.pack(checksum.intdigest(), xxh3_128(whose).digest())
