"""Computes fingerprints of states. Equal states have equal fingerprints, regardless of earlier actions."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.slots import LruOrder
from kvoffload.model.message import Message

_Draw = Callable[[Any, "_Met"], object]


def fingerprint(value: object, *, constant: Collection[type] = ()) -> object:
    """Return a fingerprint, made of tuples and atoms, of a value and of all objects that the value refers to.

    The order matters in lists, queues, `OrderedDict` and `LruOrder`, but not in dicts and sets. The second
    occurrence of an object is replaced by the number of its first occurrence, so cycles end. Tuples, messages
    and frozen dataclasses are values and are expanded again.

    Args:
        value: the value to describe.
        constant: types whose objects are left out, because they are the same in all compared states.
    """
    return _Met(constant).draw(value)


class _Met:
    """Numbers objects in the order in which they are found."""

    __slots__ = ("_constant", "_numbers")

    def __init__(self, constant: Collection[type]) -> None:
        self._constant = constant
        self._numbers: dict[int, int] = {}

    def draw(self, value: object) -> object:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in self._constant:
            return kind.__name__
        drawing = _DRAWINGS.get(kind)
        if drawing is None:
            drawing = _DRAWINGS[kind] = _drawing(kind)
        is_value, draw = drawing
        if not is_value:
            number = self._numbers.get(id(value))
            if number is not None:
                return ("met", number)
            self._numbers[id(value)] = len(self._numbers)
        return draw(value, self)


def _members(values: Iterable[Any], met: _Met) -> object:
    return tuple([met.draw(item) for item in values])


def _sorted_members(values: Iterable[Any], met: _Met) -> object:
    # The values are sorted first, so that the numbering does not depend on the insertion order.
    return _members(_in_order(values), met)


def _ordered_items(value: dict[Any, Any], met: _Met) -> object:
    return tuple([(met.draw(key), met.draw(item)) for key, item in value.items()])


def _items(value: Mapping[Any, Any], met: _Met) -> object:
    return tuple([(met.draw(key), met.draw(value[key])) for key in _in_order(value)])


def _in_order(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # Enums and records cannot be compared with `<`.
        return sorted(values, key=repr)


def _drawing(kind: type) -> tuple[bool, _Draw]:
    """Return whether objects of this type are values without an identity, and a function that describes them."""
    if issubclass(kind, Enum):
        return True, lambda value, met: value.name
    for kinds, is_value, draw in _CONTAINERS:
        if issubclass(kind, kinds):
            return is_value, draw
    if issubclass(kind, Message):
        message: type[Message] = kind
        return True, _record(kind.__name__, message.__struct_fields__)
    is_frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return is_frozen, _record(kind.__name__, _slots(kind))


def _slots(kind: type) -> tuple[str, ...]:
    names = (name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))
    return tuple(sorted(name for name in names if name not in ("__dict__", "__weakref__")))


def _record(title: str, slots: tuple[str, ...]) -> _Draw:
    def draw(value: object, met: _Met) -> object:
        parts = [(name, met.draw(getattr(value, name))) for name in slots if hasattr(value, name)]
        own = getattr(value, "__dict__", None)
        if own:
            parts += [(name, met.draw(own[name])) for name in sorted(own)]
        return (title, *parts)

    return draw


_ATOMS = frozenset((str, bytes, int, float, bool, type(None)))
_CONTAINERS: tuple[tuple[tuple[type, ...], bool, _Draw], ...] = (
    ((bytearray, array), False, lambda value, met: bytes(value)),
    ((OrderedDict,), False, _ordered_items),
    ((Counter, dict, KeyIndex), False, _items),
    ((frozenset,), True, _sorted_members),
    ((set,), False, _sorted_members),
    ((tuple,), True, _members),
    ((list, deque, LruOrder), False, _members),
    ((FunctionType, BuiltinFunctionType, MethodType), True, lambda value, met: value.__qualname__),
)
_DRAWINGS: dict[type, tuple[bool, _Draw]] = {}
