"""Computes fingerprints of states. Equal states have equal fingerprints, regardless of earlier actions."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from kvoffload.core.jobs import Offer
from kvoffload.core.key_index import KeyIndex
from kvoffload.core.order import LruOrder
from kvoffload.model.message import Message

_Describe = Callable[[Any, "_Describer"], object]


def fingerprint(value: object, *, constant: Collection[type] = ()) -> object:
    """Return a fingerprint, made of tuples and atoms, of a value and of all objects that the value refers to.

    The order matters in lists, queues, `OrderedDict` and `LruOrder`, but not in dicts and sets. The second
    occurrence of an object is replaced by the number of its first occurrence, so cycles end. Tuples, messages
    and frozen dataclasses are values and are expanded again.

    Args:
        value: the value to describe.
        constant: types whose objects are left out, because they are the same in all compared states.
    """
    return _Describer(constant).describe(value)


class _Describer:
    """Numbers objects in the order in which they are found."""

    __slots__ = ("_constant", "_numbers")

    def __init__(self, constant: Collection[type]) -> None:
        self._constant = constant
        self._numbers: dict[int, int] = {}

    def describe(self, value: object) -> object:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in self._constant:
            return kind.__name__
        description = _DESCRIPTIONS.get(kind)
        if description is None:
            description = _DESCRIPTIONS[kind] = _description_of(kind)
        is_value, describe = description
        if not is_value:
            number = self._numbers.get(id(value))
            if number is not None:
                return ("met", number)
            self._numbers[id(value)] = len(self._numbers)
        return describe(value, self)


def _members(values: Iterable[Any], describer: _Describer) -> object:
    return tuple([describer.describe(item) for item in values])


def _sorted_members(values: Iterable[Any], describer: _Describer) -> object:
    # The values are sorted first, so that the numbering does not depend on the insertion order.
    return _members(_in_order(values), describer)


def _ordered_items(value: dict[Any, Any], describer: _Describer) -> object:
    return tuple([(describer.describe(key), describer.describe(item)) for key, item in value.items()])


def _items(value: Mapping[Any, Any], describer: _Describer) -> object:
    return tuple([(describer.describe(key), describer.describe(value[key])) for key in _in_order(value)])


def _in_order(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # Enums and records cannot be compared with `<`.
        return sorted(values, key=repr)


def _description_of(kind: type) -> tuple[bool, _Describe]:
    """Return whether objects of this type are values without an identity, and a function that describes them."""
    if issubclass(kind, Enum):
        return True, lambda value, describer: value.name
    for kinds, is_value, describe in _CONTAINERS:
        if issubclass(kind, kinds):
            return is_value, describe
    if issubclass(kind, Message):
        message: type[Message] = kind
        return True, _record(kind.__name__, message.__struct_fields__)
    is_frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return is_frozen, _record(kind.__name__, _slots(kind))


def _slots(kind: type) -> tuple[str, ...]:
    names = (name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))
    return tuple(sorted(name for name in names if name not in ("__dict__", "__weakref__")))


def _record(title: str, slots: tuple[str, ...]) -> _Describe:
    def describe(value: object, describer: _Describer) -> object:
        parts = [(name, describer.describe(getattr(value, name))) for name in slots if hasattr(value, name)]
        own = getattr(value, "__dict__", None)
        if own:
            parts += [(name, describer.describe(own[name])) for name in sorted(own)]
        return (title, *parts)

    return describe


def _offer(offer: Offer, describer: _Describer) -> object:
    # The columns may be lists, tuples or ranges.
    columns = [tuple(column) for column in (offer.keys, offer.blocks, offer.places)]
    return tuple(columns), describer.describe(offer.record), offer.incarnation


_ATOMS = frozenset((str, bytes, int, float, bool, type(None)))
_CONTAINERS: tuple[tuple[tuple[type, ...], bool, _Describe], ...] = (
    ((Offer,), True, _offer),
    ((bytearray, array), False, lambda value, describer: bytes(value)),
    ((OrderedDict,), False, _ordered_items),
    ((Counter, dict, KeyIndex), False, _items),
    ((frozenset,), True, _sorted_members),
    ((set,), False, _sorted_members),
    ((tuple,), True, _members),
    ((list, deque, LruOrder), False, _members),
    ((FunctionType, BuiltinFunctionType, MethodType), True, lambda value, describer: value.__qualname__),
)
_DESCRIPTIONS: dict[type, tuple[bool, _Describe]] = {}
