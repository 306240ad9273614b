"""The keys that can hit, and on request a log of their changes.

A dict whose keys come and go copies itself now and then, all of it in one call: with a million keys that takes 0.2 s inside a
hook. So the index consists of many dicts, chosen by the first byte of a key, which is part of a hash and as good as random. It
starts as one dict; a dict that grows too long is split in two, until there is one for each byte:

    first byte    00 .............. 7f 80 ...... bf c0 .. ff
    parts         [a, a, a, ... a,     b, b, ... b, c, ... c]      one entry per byte, neighbours share a dict

Keys with the same first byte always share a dict; if all keys do, a copy takes as long as with one dict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvoffload.model.ids import BlockKey, SlotId

_Part = dict[BlockKey, SlotId]

_BYTES = 256
_MOST = 2048
"""A longer part is split if it can be. Splitting or copying one of this length takes a fraction of a millisecond."""
_LOOK_AFTER = 256
"""Keys that are added between two checks of the parts' lengths."""


class KeyIndex(Mapping[BlockKey, SlotId]):
    """The slot of each key that can hit. Only the pool writes it. If a key is there, it is in `parts[key[0]]`."""

    __slots__ = ("_all", "_changes", "_unlooked", "parts")

    def __init__(self) -> None:
        self._all: list[_Part] = [{}]
        self.parts = self._all * _BYTES
        self._changes: list[tuple[BlockKey, bool]] | None = None
        self._unlooked = 0

    # -- questions, which change nothing ------------------------------------------------------------------------

    def __getitem__(self, key: BlockKey) -> SlotId:
        return self.parts[key[0]][key]

    def get(self, key: BlockKey, default: None = None) -> SlotId | None:  # type: ignore[override]  # no other default
        return self.parts[key[0]].get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self.parts[key[0]]  # type: ignore[index]  # what is asked for is a key

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def isdisjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether the index has none of these keys."""
        parts = self.parts
        for key in keys:  # noqa: SIM110  # a generator takes twice as long
            if key in parts[key[0]]:
                return False
        return True

    # -- changes ------------------------------------------------------------------------------------------------

    def watch(self) -> list[tuple[BlockKey, bool]]:
        """Return a list to which every later change is appended: a key, and True if it was added, False if removed."""
        self._changes = []
        return self._changes

    def expect(self, count: int) -> None:
        """Split now for `count` keys to come, while there are few. Later all parts would grow too long at the same time."""
        width, parts = _BYTES, self.parts
        while width > 1 and count > _MOST * _BYTES // width:
            for byte in range(0, _BYTES, width):
                if parts[byte] is parts[byte + width - 1]:
                    self._split(parts[byte], byte)
            width //= 2

    def add(self, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None:
        """Add keys with their slots."""
        parts = self.parts
        for key, slot in zip(keys, slots, strict=True):
            parts[key[0]][key] = slot
        self._unlooked += len(keys)
        if self._unlooked >= _LOOK_AFTER:
            self._split_long()
        if self._changes is not None:
            self._changes += [(key, True) for key in keys]

    def remove(self, keys: Collection[BlockKey]) -> None:
        """Remove keys. All of them must be there."""
        parts = self.parts
        for key in keys:
            del parts[key[0]][key]
        if self._changes is not None:
            self._changes += [(key, False) for key in keys]

    def take_all(self) -> Mapping[BlockKey, SlotId]:
        """Empty the index and return what it held."""
        held = KeyIndex()
        held.parts, self.parts = self.parts, held.parts
        held._all, self._all = self._all, held._all
        if self._changes is not None:
            self._changes += [(key, False) for key in held]
        return held

    # -- inside -------------------------------------------------------------------------------------------------

    def _split_long(self) -> None:
        """Split every part that is too long and can be split."""
        self._unlooked = 0
        for part in self._all:  # which grows
            while len(part) > _MOST and self.parts[(byte := next(iter(part))[0]) ^ 1] is part:
                self._split(part, byte)

    def _split(self, part: _Part, byte: int) -> None:
        """Move the keys of the upper half of a part's bytes to a new part."""
        width = sum(each is part for each in self.parts)
        middle = byte - byte % width + width // 2
        upper = {key: slot for key, slot in part.items() if key[0] >= middle}
        for key in upper:
            del part[key]
        self.parts[middle : middle + width // 2] = [upper] * (width // 2)
        self._all.append(upper)
