"""Facts, questions and answers in full, as JSON knows them, so that a core can be driven through them again.

A key stands as a small number, given in order of first appearance: equal keys have equal numbers, and nothing else is kept
of them. Free text has its bytes literals struck out. What is written is by the names of the fields, and read by them.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, NamedTuple

from kvoffload.model import facts
from kvoffload.model.facts import Fact
from kvoffload.model.ids import BlockKey
from kvoffload.telemetry.records import optional_of, plain_type, scrub

FORMAT = 1
"""Of what a replay reads. Raised when an older reader would misread a newer journal."""

FACTS: Mapping[str, type[Fact]] = {
    name: cls
    for name, cls in vars(facts).items()
    if isinstance(cls, type) and issubclass(cls, Fact) and cls is not Fact
}


class KeyNumbers:
    """Numbers for keys, from 1 on."""

    def __init__(self) -> None:
        self._numbers: dict[BlockKey, int] = {}

    def of(self, key: BlockKey) -> int:
        """Return the key's number, a new one for a new key."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)


def key_of(number: int) -> BlockKey:
    """Return a key that stands for the one with this number."""
    return BlockKey(b"%d" % number)


def write(value: object, hint: object, keys: KeyNumbers) -> Any:  # noqa: ANN401  # what JSON knows
    """Return a value of type `hint` as JSON knows it."""
    return _coder(hint).write(value, keys)


def read(value: object, hint: object) -> Any:  # noqa: ANN401  # a value of that type
    """Return what `write` was given, keys as stand-ins.

    Raises:
        ValueError: it is nothing that `write` returns for this type.
    """
    return _coder(hint).read(value)


class _Coder(NamedTuple):
    write: Callable[[Any, KeyNumbers], Any]
    read: Callable[[Any], Any]


@cache
def _coder(hint: Any) -> _Coder:  # noqa: ANN401  # any annotation
    if (present := optional_of(hint)) is not None:
        return _optional(_coder(present))
    if hint is BlockKey:
        return _Coder(lambda key, keys: keys.of(key), lambda number: key_of(_checked(number, int)))
    plain = plain_type(hint)
    origin = typing.get_origin(plain)
    if origin in (tuple, list):
        return _sequence(origin, typing.get_args(plain))
    if isinstance(plain, type) and (is_dataclass(plain) or issubclass(plain, tuple)):
        return _record(plain)
    if hint is str:  # an id is a type of its own, so this is free text
        return _Coder(lambda text, _: scrub(text), lambda text: _checked(text, str))
    return _atom(typing.cast("type", plain))


def _atom(plain: type) -> _Coder:
    if issubclass(plain, Enum):
        return _Coder(lambda value, _: value.value, plain)
    if plain not in (int, float, bool, str, NoneType):
        raise TypeError(f"no form for {plain!r}")
    return _Coder(lambda value, _: value, lambda value: _checked(value, plain))


def _optional(present: _Coder) -> _Coder:
    return _Coder(
        lambda value, keys: None if value is None else present.write(value, keys),
        lambda value: None if value is None else present.read(value),
    )


def _sequence(kind: type, items: tuple[Any, ...]) -> _Coder:
    if kind is tuple and items[-1] is not Ellipsis:
        return _pair(tuple(map(_coder, items)))
    item = _coder(items[0])
    return _Coder(
        lambda values, keys: [item.write(value, keys) for value in values],
        lambda values: kind(map(item.read, _checked(values, list))),
    )


def _pair(items: tuple[_Coder, ...]) -> _Coder:
    def write_all(values: tuple[Any, ...], keys: KeyNumbers) -> list[Any]:
        return [item.write(value, keys) for item, value in zip(items, values, strict=True)]

    def read_all(values: object) -> tuple[Any, ...]:
        return tuple(item.read(value) for item, value in zip(items, _checked(values, list), strict=True))

    return _Coder(write_all, read_all)


def _record(cls: type) -> _Coder:
    hints = typing.get_type_hints(cls)
    is_init = {one.name: one.init for one in fields(cls)} if is_dataclass(cls) else {}
    coders = {name: _coder(hint) for name, hint in hints.items() if is_init.get(name, True)}

    def write_all(value: object, keys: KeyNumbers) -> dict[str, Any]:
        return {name: coder.write(getattr(value, name), keys) for name, coder in coders.items()}

    def read_all(values: object) -> object:
        found = _checked(values, dict)
        if wrong := coders.keys() ^ found.keys():
            raise ValueError(f"{cls.__name__} has missing or unknown fields: {', '.join(sorted(wrong))}")
        return cls(**{name: coder.read(found[name]) for name, coder in coders.items()})

    return _Coder(write_all, read_all)


def _checked(value: object, kind: type) -> Any:  # noqa: ANN401  # a value of that kind
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"{value!r} is not {kind.__name__}")
    return value
