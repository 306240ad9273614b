"""A memory of the items added last."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class RecentItems(Generic[T]):
    """The items added last: at least as many as the size that `add` gets, and at most twice as many.

    Two sets take less time and memory than an order of all items: when the new set is full, the old one is dropped.
    """

    def __init__(self) -> None:
        self._new: set[T] = set()
        self._old: set[T] = set()

    def __contains__(self, item: T) -> bool:
        return item in self._new or item in self._old

    def add(self, item: T, size: float) -> None:
        self._new.add(item)
        if len(self._new) > size:
            self._old, self._new = self._new, {item}
