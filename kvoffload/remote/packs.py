"""Packs are objects in a bucket, each with many values. This file has their format, and a catalogue of the packs found.

    <folder of the shard>/<window>/<moment>-<random>-<bytes of the index>
    | index: count, then key, offset and length of each value; XXH3 | values ... |

`window` and `moment` together are the writer's time in milliseconds. They are twelve hexadecimal digits that count
down, so that a bucket lists the newest pack first. A window lasts 17.5 minutes. A listing skips windows without packs,
so times in which no engine wrote cost no requests.
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
"""The maximum number of blocks in a catalogue. If there are more, the oldest packs are dropped."""
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
    """Raised when an object is not a usable pack. The message gives the reason."""


class Place(NamedTuple):
    """Where a value is: its pack, the offset of its first byte in the pack, and its size in bytes."""

    pack: str
    start: int
    size: int


def place_at(folder: str, ms: int) -> str:
    """Return the place of a time in a folder's listing, which has the newest packs first."""
    digits = f"{_LAST_MS - ms:012x}"
    return f"{folder}{digits[:_WINDOW_DIGITS]}/{digits[_WINDOW_DIGITS:]}"


def window_of(folder: str, place: str) -> tuple[str, str | None]:
    """Return the window's folder at a place in the listing, and the place where the next window begins.

    If the place is not in a window, or is in the last window, return the whole folder and None.
    """
    digits = place.removeprefix(folder)[:_WINDOW_DIGITS]
    if re.fullmatch("[0-9a-f]{7}", digits) is None or digits == "f" * _WINDOW_DIGITS:
        return folder, None
    return f"{folder}{digits}/", f"{folder}{int(digits, 16) + 1:0{_WINDOW_DIGITS}x}/"


def new_name(folder: str, ms: int, index: bytes) -> str:
    """Return a new pack's name. `ms` is the current time in milliseconds since 1970."""
    return f"{place_at(folder, ms)}-{secrets.token_hex(8)}-{len(index)}"


def index_bytes(name: str, size: int) -> int:
    """Return the size of a pack's index in bytes.

    Args:
        name: the pack's name within the shard's folder.
        size: the pack's size in bytes, as the bucket lists it.

    Raises:
        BadPackError: the name does not have the form of a pack's name, or contains an impossible size.
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
    """Return the index of a new pack: as bytes, and as a list with the key, offset and length of each value."""
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
        index: the bytes of the index. They are checked, because any process may have written them.
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
    """Maps the keys of one shard to the places of their values, for all packs listed so far.

    A look lists the newest page. A walk then lists one older page after another, until it reaches packs that an
    earlier walk has listed. The first walk continues to the end of the listing. Every later walk continues to packs
    that are ten minutes older than the start of the walk before it, because the writers' clocks differ.

    Args:
        folder: the shard's folder in the bucket.

    Attributes:
        looking: a lock; a thread holds it while it lists packs.
        looked_at: when the newest page was last listed, in seconds of the monotonic clock.
        walked_to: the place in the listing where the walk will continue; None if no walk is under way.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.places: dict[BlockKey, Place] = {}
        self.packs: dict[str, list[BlockKey]] = {}
        self.looking = threading.Lock()
        self.looked_at = float("-inf")
        self.walked_to: str | None = None
        self._newest = ""  # the newest pack in the last listing
        self._walk_ends = self._floor = f"{folder}~"  # sorts after every pack's name
        self._next_ends = ""

    def is_new(self, pack: str) -> bool:
        """Return whether a listed pack's index must be read.

        A pack that is in the catalogue, or is as old as a dropped pack, is not read again.
        """
        return pack not in self.packs and pack < self._floor

    def newest_listed(self, newest: str, listed_to: str | None, now_ms: int) -> None:
        """Record that the newest page was listed.

        A new walk begins after this page. But if a walk is under way, and the page reaches the newest pack of the last
        look, that walk continues.

        Args:
            newest: the first pack of the page.
            listed_to: the place up to which the page was read; None if the listing ends with this page.
            now_ms: the current time in milliseconds since 1970.
        """
        if self.walked_to is None or listed_to is None or listed_to < self._newest:
            self._next_ends = place_at(self.folder, now_ms - CLOCKS_DIFFER_MS)
            self.walk_listed(listed_to)
        self._newest = newest

    def walk_listed(self, listed_to: str | None) -> None:
        """Record that the walk has reached a place in the listing; None means the listing's end."""
        self.walked_to = listed_to
        if listed_to is None or listed_to >= min(self._walk_ends, self._floor):
            self.walked_to = None
            self._walk_ends = self._next_ends

    def add(self, pack: str, places: dict[BlockKey, Place]) -> None:
        """Add a pack to the catalogue.

        If two packs contain the same key, the newer pack is used, because the older pack expires first.
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
            if place is not None and place.pack == pack:  # another pack may also have the key's value
                del self.places[key]

    def condemn(self, pack: str) -> None:
        """Stop using a pack because its bytes do not match its index. The pack's index is not read again."""
        self.forget(pack)
        self.packs[pack] = []

    def _forget_oldest(self) -> None:
        """Drop the oldest eighth of the packs. Sorting the packs takes milliseconds, so drop many at a time."""
        packs = sorted(self.packs)
        kept = len(packs) * 7 // 8
        self._floor = packs[kept]
        for pack in packs[kept:]:
            self.forget(pack)
