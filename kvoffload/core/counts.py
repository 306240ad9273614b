"""How often things are used: pins, holds and leases. Most counts are one, so that whole batches are counted at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def count(counts: dict[T, int], items: Sequence[T]) -> None:
    """Count one use of each item."""
    once = dict.fromkeys(items, 1)
    if len(once) == len(items) and counts.keys().isdisjoint(once):
        counts.update(once)
        return
    for item in items:
        counts[item] = counts.get(item, 0) + 1


def uncount(counts: dict[T, int], items: Sequence[T]) -> Sequence[T]:
    """Undo one use of each item; return those that are not used any more, in this order.

    Raises:
        KeyError: one of them is not used; nothing has changed.
    """
    if sum(map(counts.__getitem__, items)) == len(items):
        for item in items:
            del counts[item]
        return items
    unused = list[T]()
    for item in items:
        left = counts.pop(item) - 1
        if left:
            counts[item] = left
        else:
            unused.append(item)
    return unused
