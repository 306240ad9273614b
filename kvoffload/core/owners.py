"""Which owners each of many keys has. Most keys have one owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")
Owner = TypeVar("Owner")


class Owners(Generic[Key, Owner]):
    """Maps each key to its owners.

    A long prefix has thousands of keys. A dict from each of them to a list of its owners would take three times as long to
    fill, and 90 bytes more for each key. The head of a prefix may have hundreds of owners.

    Attributes:
        first: each key's first owner.
        others: the later owners of the keys that have several, in order.
    """

    __slots__ = ("first", "others")

    def __init__(self) -> None:
        self.first: dict[Key, Owner] = {}
        self.others: dict[Key, dict[Owner, None]] = {}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.first)

    def add(self, keys: Sequence[Key], owner: Owner) -> None:
        """Make `owner` the last owner of keys that it does not own yet."""
        fresh = dict.fromkeys(keys, owner)
        for key in self.first.keys() & fresh.keys():
            self.others.setdefault(key, {})[owner] = None
            del fresh[key]
        self.first |= fresh

    def remove(self, keys: Iterable[Key], owner: Owner) -> None:
        """Remove an owner of those of the keys that it owns."""
        first, others = self.first, self.others
        for key in keys:
            rest = others.pop(key, None) if others else None
            if first.get(key) is owner:
                del first[key]
                if rest:
                    first[key] = next(iter(rest))
                    del rest[first[key]]
            elif rest:
                rest.pop(owner, None)
            if rest:
                others[key] = rest

    def pop(self, key: Key) -> Sequence[Owner]:
        """Remove a key, and return its owners, the first one first."""
        if key not in self.first:
            return ()
        return (self.first.pop(key), *self.others.pop(key, ()))
