"""Packs of values in a bucket: their names and indexes, and the catalogue of the packs that a connection has found.

    <folder of the shard>/<window>/<moment>-<random>-<bytes of the index>
    | index: count, then key, offset and length of each value; XXH3 | values ... |

Window and moment together are the writer's time in milliseconds, counted down, in twelve hexadecimal digits, so that a
bucket lists the newest pack first. All packs of one window, 17.5 minutes, have the same prefix. A listing skips windows
without packs, so nights and weekends cost no requests.
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
"""The maximum number of blocks in a catalogue. At the limit, the oldest packs are forgotten."""
MOST_PACKS = 2**17
"""The maximum number of packs in a catalogue, including packs without blocks."""
CLOCKS_DIFFER_MS = 600_000
"""The largest assumed difference between two writers' clocks, in milliseconds."""
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
    """The pack of a value, its first byte in the pack, and its size in bytes."""

    pack: str
    start: int
    size: int


def place_at(folder: str, ms: int) -> str:
    """Return the position of a timestamp in the folder's listing, which is ordered from newest to oldest."""
    digits = f"{_LAST_MS - ms:012x}"
    return f"{folder}{digits[:_WINDOW_DIGITS]}/{digits[_WINDOW_DIGITS:]}"


def window_of(folder: str, place: str) -> tuple[str, str | None]:
    """Return the folder of the window at a place in the listing, and the place where the next window begins.

    If the place is in no window, or in the last one, return the whole folder and None.
    """
    digits = place.removeprefix(folder)[:_WINDOW_DIGITS]
    if re.fullmatch("[0-9a-f]{7}", digits) is None or digits == "f" * _WINDOW_DIGITS:
        return folder, None
    return f"{folder}{digits}/", f"{folder}{int(digits, 16) + 1:0{_WINDOW_DIGITS}x}/"


def new_name(folder: str, ms: int, index: bytes) -> str:
    """Return a new name for a pack written at this time, in milliseconds since 1970."""
    return f"{place_at(folder, ms)}-{secrets.token_hex(8)}-{len(index)}"


def index_bytes(name: str, size: int) -> int:
    """Return how many bytes of a pack are its index.

    Args:
        name: the pack's name within the shard's folder.
        size: the pack's size in bytes, as the bucket lists it.

    Raises:
        BadPackError: the name is not that of a pack, or claims an impossible index size.
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
    """Return a pack's index as bytes, and as a list of each value's key, offset and length."""
    size = _COUNT.size + sum(_ENTRY.size + len(key) for key in values) + _SUM_BYTES
    entries, start = list[tuple[BlockKey, int, int]](), size
    for key, value in values.items():
        entries.append((key, start, len(value)))
        start += len(value)
    parts = [_ENTRY.pack(len(key), *place) + key for key, *place in entries]
    index = b"".join([_COUNT.pack(len(entries)), *parts])
    return index + xxh3_64_digest(index), entries


def places_in(pack: str, index: bytes | memoryview, size: int) -> dict[BlockKey, Place]:
    """Return the place of each value in a pack.

    Args:
        pack: the pack's name.
        index: the bytes read as the index; they are not trusted, because any writer may have made them.
        size: the pack's size in bytes.

    Raises:
        BadPackError: the index is incomplete, or describes values beyond the pack's end.
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
    """The places of one shard's values in the packs listed so far.

    A look lists the newest page. A walk then lists older pages, one by one, until it reaches packs that an
    earlier walk has listed; the first walk continues to the end. Because clocks differ, a walk goes
    back to ten minutes before the previous walk began.

    Args:
        folder: the shard's folder in the bucket.

    Attributes:
        looking: lock that a thread holds while it lists.
        looked_at: when the newest page was last listed, in monotonic seconds.
        walked_to: the place in the listing where the walk continues; None if no walk is under way.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.places: dict[BlockKey, Place] = {}
        self.packs: dict[str, list[BlockKey]] = {}
        self.looking = threading.Lock()
        self.looked_at = float("-inf")
        self.walked_to: str | None = None
        self._newest = ""  # the first pack of the last look
        self._walk_ends = self._floor = f"{folder}~"  # sorts after every pack
        self._next_ends = ""

    def is_new(self, pack: str) -> bool:
        """Whether a listed pack must be read: it is not in the catalogue, and newer than all dropped packs."""
        return pack not in self.packs and pack < self._floor

    def newest_listed(self, newest: str, listed_to: str | None, now_ms: int) -> None:
        """Record a look at the newest page.

        A new walk starts after this page, unless a walk is under way and the page reaches back to the last
        look's first pack.

        Args:
            newest: the first pack of the page.
            listed_to: the place up to which the page was read; None if the listing ends there.
            now_ms: milliseconds since 1970.
        """
        if self.walked_to is None or listed_to is None or listed_to < self._newest:
            self._next_ends = place_at(self.folder, now_ms - CLOCKS_DIFFER_MS)
            self.walk_listed(listed_to)
        self._newest = newest

    def walk_listed(self, listed_to: str | None) -> None:
        """Record that a walk has reached a place, or the end of the listing if None."""
        self.walked_to = listed_to
        if listed_to is None or listed_to >= min(self._walk_ends, self._floor):
            self.walked_to = None
            self._walk_ends = self._next_ends

    def add(self, pack: str, places: dict[BlockKey, Place]) -> None:
        """Remember a pack.

        If two packs have the same key, the newer one is used, because the older one expires first.
        """
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
            if place is not None and place.pack == pack:  # Two writers may have put the same key.
                del self.places[key]

    def condemn(self, pack: str) -> None:
        """Stop using a pack whose bytes do not match its index. Do not read that index again."""
        self.forget(pack)
        self.packs[pack] = []

    def _forget_oldest(self) -> None:
        """Forget the oldest eighth of the packs at once, because sorting them takes milliseconds."""
        packs = sorted(self.packs)
        kept = len(packs) * 7 // 8
        self._floor = packs[kept]
        for pack in packs[kept:]:
            self.forget(pack)
