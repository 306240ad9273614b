"""Streams and events for `torch.cpu`. On a CPU, the work has ended when a call returns."""

from __future__ import annotations

import time
from typing import Any

import torch


class Event:
    """An event that stores the time at which it was recorded."""

    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: object = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Do nothing: the work has ended."""

    def synchronize(self) -> None:
        """Do nothing: the work has ended."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.seconds - self.seconds) * 1000


def complete() -> None:
    """Add to `torch.cpu` the events and the stream methods that SGLang calls."""
    torch.cpu.Event = Event  # type: ignore[assignment,misc]
    stream: Any = torch.cpu.Stream
    for name in ("synchronize", "wait_stream", "wait_event", "record_event"):
        if not hasattr(stream, name):
            setattr(stream, name, lambda self, *_: None)
