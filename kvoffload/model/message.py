"""The base of facts, events, and the messages between the processes of an engine."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, gc=False):
    """An immutable value. Hooks build dozens for each request; a frozen dataclass takes seven times as long to build.

    The garbage collector skips messages, which cannot be in a cycle: they hold only ids, counts, enums and tuples of
    these.
    """
