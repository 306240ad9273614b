"""The journal's form of a message: its fields in compact form, and back.

Nothing that names content is kept. Bytes become their number and collections their count, except lists of request ids and of
slots. The rest is ids, counts, enums, numbers, and free text without bytes literals.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, NewType

import msgspec

from kvoffload.model import events
from kvoffload.model.events import Event
from kvoffload.model.ids import SlotId
from kvoffload.model.message import Message

_TEXT_CHARACTERS = 500
_BYTES_LITERAL = re.compile(r"""b'(?:[^'\\]|\\.)*'?|b"(?:[^"\\]|\\.)*"?""")

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """A fact's compact form, with its class's name."""

    name: str
    fields: Mapping[str, object]


def compact(messages: Iterable[Any]) -> list[object]:
    """Return messages in a form that can be kept: those without content unchanged, others as `Kept`.

    This runs inline for every fact, so values are named, and small ones formatted, only when they are read.
    """
    kept, forms = list(messages), _BULKY
    for index, message in enumerate(kept):
        if (form := forms[type(message)]) is not None and any(form.content(message)):
            values: list[Any] = list(form.values(message))
            for place, write in form.bulky:
                value = values[place]
                values[place] = list(map(len, value)) if write is _lengths else write(value)
            kept[index] = _kept((form, values))
    return kept


def to_plain(message: Any) -> dict[str, object]:  # noqa: ANN401  # one of any class
    """Return name and fields as JSON values."""
    if isinstance(message, Summary):
        summary = message
    else:
        summary = message.summary() if isinstance(message, Kept) else _form(type(message)).summarise(message)
    return {"event": summary.name, **summary.fields}


def from_plain(name: str, values: Mapping[str, object]) -> Event | Summary:
    """Return an event as it was written, anything else as a summary.

    Raises:
        ValueError: the fields do not fit the event.
    """
    cls = _EVENTS.get(name)
    if cls is None:
        _check_summary(name, values)
        return Summary(name, dict(values))
    required = set(cls.__struct_fields__[: len(cls.__struct_fields__) - len(cls.__struct_defaults__)])
    if wrong := (values.keys() - set(cls.__struct_fields__)) | (required - values.keys()):
        raise ValueError(f"{name} has missing or unknown fields: {', '.join(sorted(wrong))}")
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from error


class _Form:
    """How messages of one class are written. Made once for each class."""

    def __init__(self, cls: type[Message]) -> None:
        hints = typing.get_type_hints(cls)
        self.name = cls.__name__
        self.names = cls.__struct_fields__
        # Of a single name it returns no tuple.
        self.values: Callable[[object], Iterable[object]] = (
            attrgetter(*self.names) if len(self.names) > 1 else lambda message: _all_of(message, self.names)
        )
        writers = [(place, *_writer(hints[name])) for place, name in enumerate(self.names)]
        self.bulky = tuple((place, write) for place, write, is_bulky in writers if is_bulky)
        bulky = [self.names[place] for place, _ in self.bulky]
        # Given two names or more it returns a tuple.
        self.content: Callable[[object], Iterable[object]] = (
            attrgetter(*bulky, bulky[0]) if bulky else lambda message: ()
        )
        self._small = tuple((place, write) for place, write, is_bulky in writers if not is_bulky)

    def summary(self, values: list[object]) -> Summary:
        """Return values with their names; what is bulky was written before."""
        for place, write in self._small:
            values[place] = write(values[place])
        return Summary(self.name, dict(zip(self.names, values, strict=True)))

    def summarise(self, message: object) -> Summary:
        values = list(self.values(message))
        for place, write in self.bulky:
            values[place] = write(values[place])
        return self.summary(values)


class Kept(NamedTuple):
    """A message's fields in their order, those that are bulky as they are written."""

    form: _Form
    values: list[object]

    def summary(self) -> Summary:
        """Return them with their names, as they are written."""
        return self.form.summary(self.values.copy())


_kept: Callable[[tuple[_Form, list[object]]], Kept] = partial(tuple.__new__, Kept)


def _all_of(message: object, names: Iterable[str]) -> tuple[object, ...]:
    return tuple(getattr(message, name) for name in names)


def _as_it_is(value: object) -> object:
    return value


def _form(cls: type[Message]) -> _Form:
    form = _FORMS.get(cls)
    if form is None:
        form = _FORMS[cls] = _Form(cls)
    return form


def _writer(hint: object) -> tuple[Convert, bool]:
    """Return how a field of this type is written, and whether it is too large or private to keep."""
    if optional := optional_of(hint):
        write, bulky = _writer(optional)
        return lambda value: None if value is None else write(value), bulky
    plain = plain_type(hint)
    if plain is bytes:
        return len, True
    if typing.get_origin(plain) is tuple:
        return _tuple_writer(typing.get_args(plain)[0])
    if isinstance(plain, type) and issubclass(plain, Message):
        return lambda value: dict(_form(type(value)).summarise(value).fields), False
    if hint is str:  # ids have their own types, so this is free text
        return scrub, False
    if isinstance(plain, type) and issubclass(plain, Enum):
        return lambda value: value.value, False
    if plain in (int, float, bool, str):
        return _as_it_is, False
    raise TypeError(f"no form for a field of type {hint!r}")


def _tuple_writer(item: object) -> tuple[Convert, bool]:
    if item is SlotId:
        return list, False
    if typing.get_origin(item) is tuple:
        return _lengths, True
    return (list if plain_type(item) is str else len), True


def _lengths(groups: Iterable[Sized]) -> list[int]:
    return list(map(len, groups))


def _check_summary(name: str, values: Mapping[str, object]) -> None:
    """Refuse a summary in which a field that readers use has another type."""
    for field, is_right in _READ_OF_SUMMARIES.items():
        if field in values and not is_right(values[field]):
            raise ValueError(f"{field} of {name} is {values[field]!r}")


def optional_of(hint: object) -> object:
    """Return X of `X | None`, and None for anything else."""
    if typing.get_origin(hint) not in (typing.Union, UnionType):  # a NewType's `|` makes the former
        return None
    present = [one for one in typing.get_args(hint) if one is not NoneType]
    return present[0] if len(present) == 1 else None


def plain_type(hint: object) -> object:
    """Return the type below a `NewType`."""
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    return hint


def scrub(text: str) -> str:
    """Return free text as it may be written."""
    return _BYTES_LITERAL.sub("b'...'", text)[:_TEXT_CHARACTERS]


_READ_OF_SUMMARIES: dict[str, Convert] = {
    "request": lambda value: type(value) is str,
    "job": lambda value: type(value) is int,
    "preempted": lambda value: type(value) is list and all(type(one) is str for one in value),
}
_FORMS: dict[type, _Form] = {}


class _Bulky(dict[type, _Form | None]):
    def __missing__(self, cls: type) -> _Form | None:
        form = _form(cls)
        bulky = self[cls] = form if form.bulky else None
        return bulky


_BULKY = _Bulky()
"""The forms of classes that hold content, None for the others."""
_EVENTS: dict[str, type[Event]] = {
    name: cls
    for name, cls in vars(events).items()
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
