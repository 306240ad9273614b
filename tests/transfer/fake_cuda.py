"""A fake CUDA device that runs its streams one operation at a time, when the test calls `run`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvoffload.model.wire import Direction
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.runs import CopyRuns


@dataclass(frozen=True, slots=True)
class FakeScratch:
    device: int
    host: np.ndarray


@dataclass(eq=False)
class Event:
    timed: bool
    passed_at: float | None = None


@dataclass(eq=False)
class Stream:
    urgent: bool
    operations: deque[tuple[str, object]] = field(default_factory=deque)


class FakeCuda:
    """A fake device. Operations run only in `run`, which stops at a wait for a later event."""

    slice_copies = 2048

    def __init__(self) -> None:
        self.main = Stream(urgent=False)
        self.streams: list[Stream] = []
        self.events = 0
        self.time = 0.0
        self.kernel_error: Exception | None = None
        self.prepared: list[object] = []
        # The size of the scratch memory, if not the requested size.
        self.scratch_bytes: int | None = None
        self.lent = 0
        self.seconds: Callable[[str, CopyRuns], float] = lambda kind, runs: 1.0

    def stream(self, *, urgent: bool) -> Stream:
        self.streams.append(Stream(urgent))
        return self.streams[-1]

    def event(self, *, timed: bool) -> Event:
        self.events += 1
        return Event(timed)

    def record_current(self, event: Event) -> None:
        self.record(event, self.main)

    def record(self, event: Event, stream: Stream) -> None:
        event.passed_at = None
        stream.operations.append(("record", event))

    def wait(self, stream: Stream, event: Event) -> None:
        stream.operations.append(("wait", event))

    def has_passed(self, event: Event) -> bool:
        return event.passed_at is not None

    def seconds_between(self, start: Event, end: Event) -> float:
        assert start.timed
        assert end.timed
        assert start.passed_at is not None
        assert end.passed_at is not None
        return end.passed_at - start.passed_at

    def has_room(self, stream: Stream, copies: int, *, may_wait: bool) -> bool:
        return True

    def copy(self, direction: Direction, runs: CopyRuns, stream: Stream) -> None:
        stream.operations.append(("copy", runs))

    def prepare_kernel(self, stream: Stream, programs: int) -> None:
        if self.kernel_error is not None:
            raise self.kernel_error
        self.prepared.append(stream)

    def copy_by_kernel(self, runs: CopyRuns, stream: Stream) -> None:
        if self.kernel_error is not None:
            raise self.kernel_error
        stream.operations.append(("kernel", runs))

    @contextmanager
    def scratch(self, size: int, stream: Stream) -> Iterator[FakeScratch]:
        size = self.scratch_bytes or size
        device = np.zeros(size, np.uint8)
        self.lent += 1
        yield FakeScratch(device.ctypes.data, np.zeros(2 * size, np.uint8))
        self.lent -= 1

    def run(self, stream: Stream, operations: int = 1000) -> None:
        while stream.operations and operations > 0:
            kind, what = stream.operations[0]
            if kind == "wait" and isinstance(what, Event) and what.passed_at is None:
                return
            stream.operations.popleft()
            operations -= 1
            self.time += self.seconds(kind, what) if isinstance(what, CopyRuns) else 1.0
            if isinstance(what, Event) and kind == "record":
                what.passed_at = self.time
            if isinstance(what, CopyRuns):
                copy_by_memmove(what)
