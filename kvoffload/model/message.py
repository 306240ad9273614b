"""The base class of facts, events, and messages between an engine's processes."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, gc=False):
    """An immutable value. Hooks build dozens of these per request.

    Building a frozen dataclass takes seven times as long.

    The garbage collector skips messages. Messages cannot be part of a cycle, because they contain only ids, counts,
    enums and tuples of these.
    """
