"""Who claims each of many keys. Most keys are claimed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")
Claimant = TypeVar("Claimant")


class Claims(Generic[Key, Claimant]):
    """Maps each key to those who claim it.

    A long prefix has thousands of keys. A dict from each of them to a list of claimants would take three times as long to
    fill, and 90 bytes more for each key. Hundreds may claim the head of a prefix.

    Attributes:
        first: each key's first claimant.
        others: the later claimants of the keys that have several, in order.
    """

    __slots__ = ("first", "others")

    def __init__(self) -> None:
        self.first: dict[Key, Claimant] = {}
        self.others: dict[Key, dict[Claimant, None]] = {}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.first)

    def add(self, keys: Sequence[Key], claimant: Claimant) -> None:
        """Let `claimant` claim keys that it does not claim yet."""
        fresh = dict.fromkeys(keys, claimant)
        for key in self.first.keys() & fresh.keys():
            self.others.setdefault(key, {})[claimant] = None
            del fresh[key]
        self.first |= fresh

    def remove(self, keys: Iterable[Key], claimant: Claimant) -> None:
        """End a claimant's claims to those of the keys that it claims."""
        first, others = self.first, self.others
        for key in keys:
            rest = others.pop(key, None) if others else None
            if first.get(key) is claimant:
                del first[key]
                if rest:
                    first[key] = next(iter(rest))
                    del rest[first[key]]
            elif rest:
                rest.pop(claimant, None)
            if rest:
                others[key] = rest

    def pop(self, key: Key) -> Sequence[Claimant]:
        """Remove a key, and return who claimed it, the first one first."""
        if key not in self.first:
            return ()
        return (self.first.pop(key), *self.others.pop(key, ()))
