"""Packs of values in a bucket: their names, their indexes, and what a connection remembers of them.

    <folder of the shard>/<window>/<moment>-<random>-<bytes of the index>
    | index: count, then key, offset and length of each value; XXH3 | values ... |

Window and moment are the twelve hexadecimal digits of the writer's time in milliseconds, counted down, so a bucket lists the newest
pack first. All packs of one window, 17.5 minutes, have one prefix. A listing goes on from one window to the next that has packs, so
nights and weekends cost no requests.
"""

from __future__ import annotations

import re
import secrets
import struct
import threading
from collections.abc import Mapping
from typing import NamedTuple

from xxhash import xxh3_64_digest

from kvoffload.model.ids import BlockKey

MOST_BLOCKS = 2**20
"""Blocks that a catalogue remembers; the oldest packs are forgotten first."""
MOST_PACKS = 2**17
"""Packs that a catalogue remembers, those without blocks among them."""
CLOCKS_DIFFER_MS = 600_000
"""Most that the clocks of two writers differ."""
_MOST_INDEX_BYTES = 2**14
_LAST_MS = 2**48 - 1
_WINDOW_DIGITS = 7
_NAME = re.compile(r"[0-9a-f]{7}/[0-9a-f]{5}-[0-9a-f]{16}-([0-9]{1,9})")
_ENTRY = struct.Struct("<HQQ")
_COUNT = struct.Struct("<I")
_SUM_BYTES = 8


class BadPackError(Exception):
    """Raised for an object that is not a usable pack; the message gives the reason."""


class Place(NamedTuple):
    """Where a value lies: in which pack, from which byte on, and how many bytes."""

    pack: str
    start: int
    size: int


def place_at(folder: str, ms: int) -> str:
    """Return where packs of this time are in a listing of the folder: after newer ones, before older ones."""
    digits = f"{_LAST_MS - ms:012x}"
    return f"{folder}{digits[:_WINDOW_DIGITS]}/{digits[_WINDOW_DIGITS:]}"


def window_of(folder: str, place: str) -> tuple[str, str | None]:
    """Return the folder of the window of a place in the listing, and where the next window begins; None if no pack follows."""
    digits = place.removeprefix(folder)[:_WINDOW_DIGITS]
    if re.fullmatch("[0-9a-f]{7}", digits) is None or digits == "f" * _WINDOW_DIGITS:
        return folder, None
    return f"{folder}{digits}/", f"{folder}{int(digits, 16) + 1:0{_WINDOW_DIGITS}x}/"


def new_name(folder: str, ms: int, index: bytes) -> str:
    """Return a name for a pack that is written at this time."""
    return f"{place_at(folder, ms)}-{secrets.token_hex(8)}-{len(index)}"


def index_bytes(name: str, size: int) -> int:
    """Return how many bytes of a pack are its index.

    Args:
        name: within the shard's folder.
        size: of the pack, in bytes, as the bucket lists it.

    Raises:
        BadPackError: the name is not a pack's, or claims an impossible number.
    """
    if (found := _NAME.fullmatch(name)) is None:
        raise BadPackError("no pack is called so")
    least, most = _COUNT.size + _SUM_BYTES, min(_MOST_INDEX_BYTES, size)
    if not least <= int(found[1]) <= most:
        raise BadPackError(
            f"its name claims an index of {int(found[1])} bytes; {least} to {most} are possible"
        )
    return int(found[1])


def index_of(values: Mapping[BlockKey, memoryview]) -> tuple[bytes, list[tuple[BlockKey, int, int]]]:
    """Return a pack's index, and what it says: each value's key, offset and length."""
    size = _COUNT.size + sum(_ENTRY.size + len(key) for key in values) + _SUM_BYTES
    entries, start = list[tuple[BlockKey, int, int]](), size
    for key, value in values.items():
        entries.append((key, start, len(value)))
        start += len(value)
    parts = [_ENTRY.pack(len(key), *place) + key for key, *place in entries]
    index = b"".join([_COUNT.pack(len(entries)), *parts])
    return index + xxh3_64_digest(index), entries


def places_in(pack: str, index: bytes | memoryview, size: int) -> dict[BlockKey, Place]:
    """Return where a pack's values lie.

    Args:
        pack: its name.
        index: as it was read; any writer may have made it.
        size: of the pack, in bytes.

    Raises:
        BadPackError: the index is incomplete, or does not describe such a pack.
    """
    entries, at = index[:-_SUM_BYTES], _COUNT.size
    if xxh3_64_digest(entries) != index[-_SUM_BYTES:]:
        raise BadPackError("its index is incomplete")
    places: dict[BlockKey, Place] = {}
    try:
        for _ in range(_COUNT.unpack_from(entries)[0]):
            length, *place = _ENTRY.unpack_from(entries, at)
            at += _ENTRY.size + length
            places[BlockKey(bytes(entries[at - length : at]))] = Place(pack, *place)
    except struct.error:
        raise BadPackError("its index ends within an entry") from None
    if at != len(entries) or any(place.start + place.size > size for place in places.values()):
        raise BadPackError("its index describes another object")
    return places


class Catalogue:
    """Where the values of one shard lie, as far as the bucket was listed.

    A look lists the newest page. A walk lists the older pages, one after the other, down to what an earlier walk has seen; the first one
    goes on to the end. As clocks differ, the next walk sees again what was written in the ten minutes before this one began.

    Args:
        folder: of the shard, in the bucket.

    Attributes:
        looking: held by the thread that lists.
        looked_at: when the newest page was listed last, on a clock of seconds.
        walked_to: the place in the listing from which the walk goes on; None if none is under way.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.places: dict[BlockKey, Place] = {}
        self.packs: dict[str, list[BlockKey]] = {}
        self.looking = threading.Lock()
        self.looked_at = float("-inf")
        self.walked_to: str | None = None
        self._newest = ""  # of the last look
        self._walk_ends = self._floor = f"{folder}~"  # behind every pack
        self._next_ends = ""

    def is_new(self, pack: str) -> bool:
        """Whether a listed pack must be read: it is not known, and not older than the packs that were forgotten."""
        return pack not in self.packs and pack < self._floor

    def newest_listed(self, newest: str, listed_to: str | None, now_ms: int) -> None:
        """Note the newest page. A walk begins behind it, unless one is under way and there is nothing new between the two.

        Args:
            newest: the first pack of the page.
            listed_to: its last pack that is known now; None if there is no further page.
            now_ms: time in milliseconds.
        """
        if self.walked_to is None or listed_to is None or listed_to < self._newest:
            self._next_ends = place_at(self.folder, now_ms - CLOCKS_DIFFER_MS)
            self.walk_listed(listed_to)
        self._newest = newest

    def walk_listed(self, listed_to: str | None) -> None:
        """Note that a walk has come to a place, or to the end of the listing."""
        self.walked_to = listed_to
        if listed_to is None or listed_to >= min(self._walk_ends, self._floor):
            self.walked_to = None
            self._walk_ends = self._next_ends

    def add(self, pack: str, places: dict[BlockKey, Place]) -> None:
        """Remember a pack. If two packs have the same key, the newer one is used, because the older one expires first."""
        if pack >= self._floor:
            return
        self.packs[pack] = list(places)
        for key, place in places.items():
            known = self.places.get(key)
            if known is None or pack < known.pack:
                self.places[key] = place
        while len(self.places) > MOST_BLOCKS or len(self.packs) > MOST_PACKS:
            self._forget_oldest()

    def forget(self, pack: str) -> None:
        for key in self.packs.pop(pack, ()):
            place = self.places.get(key)
            if place is not None and place.pack == pack:  # two writers may have put one key
                del self.places[key]

    def condemn(self, pack: str) -> None:
        """Stop using a pack whose bytes do not match its index, and do not read that index again."""
        self.forget(pack)
        self.packs[pack] = []

    def _forget_oldest(self) -> None:
        """Forget an eighth of the packs: sorting takes milliseconds."""
        packs = sorted(self.packs)
        kept = len(packs) * 7 // 8
        self._floor = packs[kept]
        for pack in packs[kept:]:
            self.forget(pack)
