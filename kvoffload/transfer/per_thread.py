"""Values of which each thread has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """A value for each thread, created when the thread first uses it.

    Args:
        make: creates a thread's value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    @cached_property
    def own(self) -> T:
        """Return the calling thread's value."""
        return self._make()
