"""The format of a value in the remote tier: the bytes of a block on one rank, and a trailer to verify them.

    |<----------- slot_bytes ----------->|<---------------- TRAILER_BYTES ---------------->|
    | the slot's pages, region by region | magic, length, XXH3, hash of name and layout    |    without a key
    |                                    | magic, length, HMAC-SHA256 with name and layout |    with a key

Values are not trusted, because other writers may use the same names, and the remote tier may truncate or mix up
values. A value is used only if its length, checksum and name match. Forged values are noticed only with a key.
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
_HEAD = struct.Struct("<4sIQ")  # magic number, kind of trailer, number of bytes in the slot
_CHECKSUM = struct.Struct("<Q16s")
_MAGIC = FORMAT.encode()
_CHECKED, _AUTHENTICATED = 1, 2
_GENERATION = re.compile(rb"([0-9a-f]{32}) after a (start|reset)")
_TIME_DIGITS = 16

TRAILER_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Shard:
    """All values of one rank in one namespace.

    Args:
        namespace: the fingerprint of the KV's identity and the generation. A reset replaces the generation.
        rank, ranks: the rank whose values these are, and the number of ranks.
    """

    namespace: str
    rank: int
    ranks: int

    @property
    def part(self) -> str:
        """Return the rank and the number of ranks as text, for use in names."""
        return f"{self.rank}of{self.ranks}"

    def name(self, key: BlockKey) -> str:
        return f"{FORMAT}/{self.namespace}/{key.hex()}/{self.part}"


def generation_name(fingerprint: str) -> str:
    """Return the name under which the remote tier has the generation that engines share."""
    return f"{FORMAT}/{fingerprint}/generation"


class Generation(NamedTuple):
    """The generation that engines share. Engines find only values that were written in this generation.

    Args:
        name: 32 random hexadecimal digits.
        is_after_reset: whether a reset of an engine's cache began this generation.
        made_ms: when the generation began, in milliseconds since 1970; 0 without a key.
    """

    name: str
    is_after_reset: bool
    made_ms: int


def new_generation(name: str, key: TierKey | None, after_ms: int, *, is_after_reset: bool = False) -> bytes:
    """Return the bytes of a new generation, which has a random name.

    The number of bytes depends only on whether there is a key, so that Mooncake replaces a generation in place.

    Args:
        name: the name under which the remote tier has the generation, from `generation_name`.
        key: authenticates the generation; None if all writers are trusted.
        after_ms: when the previous generation began, in milliseconds since 1970. The new generation gets a later time,
            even if this machine's clock is behind.
        is_after_reset: whether a reset of the cache begins the generation.
    """
    text = f"{secrets.token_hex(16)} after a {'reset' if is_after_reset else 'start'}".encode()
    if key is None:
        return text
    made_ms = max(time.time_ns() // 10**6, after_ms + 1)
    dated = text + f" {made_ms:0{_TIME_DIGITS}}".encode()
    return dated + b" " + _generation_mac(name, key, dated)


def read_generation(name: str, key: TierKey | None, data: bytes) -> Generation | None:
    """Return the generation that `data` describes; None if `data` has another form or is not authentic."""
    made_ms = b"0"
    if key is not None:
        dated, _, mac = data.rpartition(b" ")
        if not hmac.compare_digest(mac, _generation_mac(name, key, dated)):
            return None
        data, _, made_ms = dated.rpartition(b" ")
    found = _GENERATION.fullmatch(data)
    return None if found is None else Generation(found[1].decode(), found[2] == b"reset", int(made_ms))


def _generation_mac(name: str, key: TierKey, dated: bytes) -> bytes:
    return key.mac(b"generation " + name.encode(), dated).hex().encode()


def seal(value: memoryview, name: str, layout: bytes, key: TierKey | None = None) -> None:
    """Write the trailer after a slot's bytes.

    Args:
        value: the slot's bytes, followed by space for the trailer.
        name: the value's name.
        layout: a digest, 16 bytes long, of the layout of the slot's pages.
        key: authenticates the value; None for a plain checksum.
    """
    size = len(value) - TRAILER_BYTES
    value[size:] = _trailer(value[:size], name, layout, key)


def is_whole(value: memoryview, arrived: int, name: str, layout: bytes, key: TierKey | None = None) -> bool:
    """Return whether a value is complete and correct.

    `arrived` is the number of bytes that were read. All bytes must have arrived, and match the trailer, the name and
    the layout.
    """
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
    checksum.update(data)  # `update` releases the GIL
    head = _HEAD.pack(_MAGIC, _CHECKED, len(data))
    return head + _CHECKSUM.pack(checksum.intdigest(), xxh3_128(whose).digest())
