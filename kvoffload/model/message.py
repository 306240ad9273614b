"""The base of facts, events, and what crosses between the processes of an engine."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, gc=False):
    """An immutable value. Hooks build dozens of them for each request; a frozen dataclass takes seven times as long to build.

    The garbage collector skips messages: they hold only ids, counts, enums and tuples of these, so they cannot be in a cycle.
    """
