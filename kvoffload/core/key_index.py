"""Maps each key that can hit to its slot.

A dict with many insertions and deletions is sometimes rebuilt in a single call, which takes 200 ms inside a hook for a
million keys. So the index consists of several dicts, and the first byte of a key selects one. Keys are hashes, so their
first bytes are spread evenly. The index starts as one dict. A dict that grows too long is split in two, until there is
one per byte value:

    first byte    00 .............. 7f 80 ...... bf c0 .. ff
    parts         [a, a, a, ... a,     b, b, ... b, c, ... c]      one entry per byte, neighbours share a dict

Keys with the same first byte always share a dict. If all keys began with the same byte, a rebuild would take as long as
with a single dict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvoffload.model.ids import BlockKey, SlotId

_Part = dict[BlockKey, SlotId]

_BYTES = 256
_MOST = 2048
"""A part with more keys than this is split if possible.

Splitting or rebuilding a part of this length takes well under 1 ms.
"""
_LOOK_AFTER = 256
"""How many keys are added between two checks of the parts' lengths."""


class KeyIndex(Mapping[BlockKey, SlotId]):
    """Maps each key that can hit to its slot. Only `SlotPool` writes the index.

    `parts[key[0]]` is the dict in which a key is stored.
    """

    __slots__ = ("_all", "_changes", "_unlooked", "parts")

    def __init__(self) -> None:
        self._all: list[_Part] = [{}]
        self.parts = self._all * _BYTES
        self._changes: list[tuple[BlockKey, bool]] | None = None
        self._unlooked = 0

    # -- queries; they change nothing ---------------------------------------------------------------------------

    def __getitem__(self, key: BlockKey) -> SlotId:
        return self.parts[key[0]][key]

    def get(self, key: BlockKey, default: None = None) -> SlotId | None:  # type: ignore[override]  # only None is used
        return self.parts[key[0]].get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self.parts[key[0]]  # type: ignore[index]  # callers only pass keys

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self._all)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def isdisjoint(self, keys: Iterable[BlockKey]) -> bool:
        parts = self.parts
        for key in keys:  # noqa: SIM110  # a generator takes twice as long
            if key in parts[key[0]]:
                return False
        return True

    # -- changes ------------------------------------------------------------------------------------------------

    def watch(self) -> list[tuple[BlockKey, bool]]:
        """Return a list to which the index appends later changes: a key, and whether the key was added or removed."""
        self._changes = []
        return self._changes

    def unwatch(self) -> None:
        """Stop appending changes to the list that `watch` returned."""
        self._changes = None

    def expect(self, count: int) -> None:
        """Split the parts for `count` expected keys.

        Splitting empty parts is cheap. Parts that fill evenly would otherwise all be split at about the same time.
        """
        width, parts = _BYTES, self.parts
        while width > 1 and count > _MOST * _BYTES // width:
            for byte in range(0, _BYTES, width):
                if parts[byte] is parts[byte + width - 1]:
                    self._split(parts[byte], byte)
            width //= 2

    def add(self, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None:
        parts = self.parts
        for key, slot in zip(keys, slots, strict=True):
            parts[key[0]][key] = slot
        self._unlooked += len(keys)
        if self._unlooked >= _LOOK_AFTER:
            self._split_long()
        if self._changes is not None:
            self._changes += [(key, True) for key in keys]

    def remove(self, keys: Collection[BlockKey]) -> None:
        """Remove keys. The index must have all of them."""
        parts = self.parts
        for key in keys:
            del parts[key[0]][key]
        if self._changes is not None:
            self._changes += [(key, False) for key in keys]

    def take_all(self) -> Mapping[BlockKey, SlotId]:
        """Empty the index and return its former keys and slots."""
        held = KeyIndex()
        held.parts, self.parts = self.parts, held.parts
        held._all, self._all = self._all, held._all
        if self._changes is not None:
            self._changes += [(key, False) for key in held]
        return held

    # -- internal -----------------------------------------------------------------------------------------------

    def _split_long(self) -> None:
        """Split every part with more than `_MOST` keys, unless the part covers a single byte value."""
        self._unlooked = 0
        for part in self._all:  # The loop also visits the parts that `_split` appends to this list.
            while len(part) > _MOST and self.parts[(byte := next(iter(part))[0]) ^ 1] is part:
                self._split(part, byte)

    def _split(self, part: _Part, byte: int) -> None:
        """Move the keys in the upper half of a part's byte range to a new part."""
        width = sum(each is part for each in self.parts)
        middle = byte - byte % width + width // 2
        upper = {key: slot for key, slot in part.items() if key[0] >= middle}
        for key in upper:
            del part[key]
        self.parts[middle : middle + width // 2] = [upper] * (width // 2)
        self._all.append(upper)
