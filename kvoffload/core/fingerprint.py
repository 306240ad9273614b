"""A hashable picture of any state in here: equal for equal states, however they were reached."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from functools import partial

_ATOMS = (str, bytes, int, float, bool, type(None), Enum)


def fingerprint(value: object) -> object:
    """Return a hashable picture of a value and all that it refers to. Reads only.

    Order counts in lists, queues and `OrderedDict`; not in dicts and sets. An object met for the second time stands as
    the number of its first meeting, so cycles end.
    """
    return _picture(value, {})


def _picture(value: object, met: dict[int, int]) -> object:
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if id(value) in met and not isinstance(value, tuple):
        return ("met", met[id(value)])
    met[id(value)] = len(met)
    for kinds, draw in _DRAWINGS:
        if isinstance(value, kinds):
            return draw(value, partial(_picture, met=met))
    if callable(value) and not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", repr(type(value)))
    return (type(value).__name__, *(_picture(getattr(value, name), met) for name in _fields(value)))


def _fields(value: object) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted(name for name in {*slots, *getattr(value, "__dict__", ())} if hasattr(value, name))


def _ordered(value: object, draw: Callable[[object], object]) -> object:
    return tuple(draw(item) for item in value)  # type: ignore[attr-defined]


def _ordered_items(value: object, draw: Callable[[object], object]) -> object:
    return tuple((draw(key), draw(item)) for key, item in value.items())  # type: ignore[attr-defined]


def _items(value: object, draw: Callable[[object], object]) -> object:
    # Sorted before they are drawn: who is met first must not depend on the order of insertion.
    items = sorted(value.items(), key=lambda item: repr(item[0]))  # type: ignore[attr-defined]
    return tuple((draw(key), draw(item)) for key, item in items)


def _members(value: object, draw: Callable[[object], object]) -> object:
    return tuple(draw(item) for item in sorted(value, key=repr))  # type: ignore[call-overload]


_DRAWINGS: tuple[tuple[tuple[type, ...], Callable[[object, Callable[[object], object]], object]], ...] = (
    ((OrderedDict,), _ordered_items),
    ((Counter, dict), _items),
    ((set, frozenset), _members),
    ((list, tuple, deque), _ordered),
)
