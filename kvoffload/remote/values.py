"""What a store holds for a rank's shard of a block: the bytes of its host slot, and a trailer that tells whether they are right.

    |<----------- slot_bytes ----------->|<--------- TRAILER_BYTES --------->|
    | the slot's pages, region by region | magic, length, XXH3, whose it is  |

The store's own word that a value is there, or whole, is not taken for it: another writer may use our names, a value may be cut, and
a store may mix values up. A value is a shard's only if its length, checksum and name say so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64, xxh3_128

from kvoffload.model.ids import BlockKey

FORMAT = "kvo1"
_TRAILER = struct.Struct("<4sIQQ16s")
_MAGIC = FORMAT.encode()

TRAILER_BYTES = _TRAILER.size


@dataclass(frozen=True, slots=True)
class Shard:
    """Whose values: of which KV, and of which rank's part of it.

    Args:
        namespace: fingerprint and generation: all that makes KV usable by another engine, and a random value.
        rank, ranks: which part of each block.
    """

    namespace: str
    rank: int
    ranks: int

    @property
    def part(self) -> str:
        """The rank of ranks, as names have it."""
        return f"{self.rank}of{self.ranks}"

    def name(self, key: BlockKey) -> str:
        """Return the name of a block's value."""
        return f"{FORMAT}/{self.namespace}/{key.hex()}/{self.part}"


def generation_name(fingerprint: str) -> str:
    """Return the name under which the store keeps the generation that engines share."""
    return f"{FORMAT}/{fingerprint}/generation"


def seal(value: memoryview, name: str, layout: bytes) -> None:
    """Write the trailer behind a slot's bytes.

    Args:
        value: both.
        name: the value's.
        layout: a digest of how the slot's pages lie.
    """
    size = len(value) - TRAILER_BYTES
    value[size:] = _trailer(value[:size], name, layout)


def is_whole(value: memoryview, arrived: int, name: str, layout: bytes) -> bool:
    """Whether these bytes, of which so many have arrived, are the value of that name."""
    size = len(value) - TRAILER_BYTES
    return arrived == len(value) and value[size:] == _trailer(value[:size], name, layout)


def _trailer(data: memoryview, name: str, layout: bytes) -> bytes:
    checksum = xxh3_64()
    checksum.update(data)  # a streamed hash lets go of the interpreter's lock
    whose = xxh3_128(name.encode() + layout).digest()
    return _TRAILER.pack(_MAGIC, 1, len(data), checksum.intdigest(), whose)
