"""The base class of facts, events, and messages between an engine's processes."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, gc=False):
    """An immutable value. Hooks build dozens of messages per request.

    Building a frozen dataclass would take seven times as long. The garbage collector ignores messages, which cannot be
    part of a cycle: they contain only ids, counts, enums and tuples.
    """
