"""The journal: the last messages in memory for error reports, and all of them in a file on request.

Recording is one append per batch, inline, so that sequence numbers have no gaps. Every 64 messages move to a ring in a shorter
form; they become text only when read. A task of the observers' loop writes the file in a worker thread, behind a feed, so
that neither the engine nor another observer waits for a disk. If the feed is full, lines are dropped and the file's sequence
numbers have a gap. Each file begins with the provenance.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import Feed
from kvoffload.bus.guard import call_guarded
from kvoffload.model.facts import StepScheduled
from kvoffload.telemetry.journal_file import JournalFile
from kvoffload.telemetry.journal_reader import BEGUN
from kvoffload.telemetry.records import compact, to_plain

_BATCH = 1024  # entries written in one go
_AT_A_TIME = 64  # messages that are shortened; one by one, each would find the processor's caches cold

M = TypeVar("M")

FailureCallback = Callable[[Exception], object]


class Entry(NamedTuple):
    """One line of the journal, not yet text."""

    sequence: int
    time: float
    message: object


_Batch = tuple[int, float, list[object]]
"""How many messages were recorded before it, its time, and its messages."""


class Journal:
    """What happened last.

    Args:
        now: the clock whose time every line carries.
        ring_size: messages kept in memory.
        path: file to append to, None for none.
        max_bytes: of the file and the one that was rotated away before it; None for no bound.
        provenance: what each file begins with; nothing where it is empty.
        on_failure: called once if the file can no longer be written.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        ring_size: int = 1024,
        path: Path | None = None,
        max_bytes: int | None = None,
        provenance: Mapping[str, object] | None = None,
        on_failure: FailureCallback | None = None,
    ) -> None:
        self._now = now
        self._ring_size = ring_size
        self._ring: deque[tuple[int, float, object]] = deque(maxlen=ring_size)
        self._young: list[_Batch] = []  # not yet shortened
        self._at_a_time = 1 if path is not None else _AT_A_TIME
        self._shorten_at = self._at_a_time
        self._recorded = 0
        self._ends_idle = False
        self._file = JournalFile(path, max_bytes) if path is not None else None
        self._provenance = provenance
        self._feed: Feed[Entry] | None = None
        self._on_failure = on_failure

    def subscribe(self, bus: Bus, capacity: int = 16384) -> None:
        """Record every fact and event from now on; `capacity` lines may wait for the file."""
        if self._file is not None:
            self._feed = bus.observe("journal", (), capacity)
        bus.record(self.record)

    def record(self, batch: list[object]) -> None:
        """Keep a batch of messages; the list is the journal's from now on."""
        recorded = self._recorded
        self._young.append((recorded, self._now(), batch))
        self._recorded = recorded = recorded + len(batch)
        if recorded >= self._shorten_at:
            self._shorten()

    def tail(self, count: int) -> list[str]:
        """Return the last `count` lines, oldest first, from any thread."""
        # In this order: what moves on meanwhile is in both, and its number shows it.
        young, entries = list(self._young), list(self._ring)
        last, ends_idle = entries[-1][0] if entries else 0, self._ends_idle
        for before, time, batch in young:
            for sequence, message in enumerate(list(batch), before + 1):
                if sequence > last:
                    if (is_idle := _is_idle_step(message)) and ends_idle:
                        entries.pop()
                    ends_idle = is_idle
                    entries.append((sequence, time, message))
        count = min(count, self._ring_size)
        return [line_of(Entry(*entry)) for entry in entries[max(len(entries) - count, 0) :]]

    async def run(self) -> None:
        """Write the file until the bus is closed; returns at once without one. A write error ends only the file."""
        if self._feed is None or self._file is None:
            return
        try:
            async for entry in self._feed:
                batch = [entry, *take_waiting(self._feed, _BATCH - 1)]
                await anyio.to_thread.run_sync(self._write, self._file, batch)
        except Exception as exc:
            if self._on_failure is not None:
                call_guarded(self._on_failure, exc)
        finally:
            self._feed.abandon()
            self._file.close()

    def _shorten(self) -> None:
        """Move what was recorded on to the ring, without what may not be held for long."""
        ring, ends_idle = self._ring, self._ends_idle
        short = iter(compact([message for _, _, batch in self._young for message in batch]))
        for before, time, batch in self._young:
            for sequence, message in enumerate(batch, before + 1):
                kept = next(short)
                is_idle = type(message) is StepScheduled and not (
                    message.progress or message.preempted or message.handed_out
                )
                if is_idle and ends_idle:
                    ring.pop()
                ends_idle = is_idle
                ring.append((sequence, time, kept))
                if self._feed is not None:
                    self._feed.offer(Entry(sequence, time, kept))
        self._ends_idle = ends_idle
        self._young.clear()
        self._shorten_at = self._recorded + self._at_a_time

    def head(self, sequence: int) -> str:
        """Return the first line of a file whose lines go on behind this one; empty without provenance."""
        if not self._provenance:
            return ""
        line = {"seq": sequence, "t": self._now(), "event": BEGUN, **self._provenance}
        return f"{json.dumps(line, separators=(',', ':'))}\n"

    def _write(self, file: JournalFile, batch: list[Entry]) -> None:
        head = self.head(batch[0].sequence - 1)
        file.append("".join(f"{line_of(entry)}\n" for entry in batch), head)


def _is_idle_step(message: object) -> bool:
    """Whether a message is a step in which nothing happened; it holds nothing that may not be held for long.

    Of several such steps in a row only the last stays: an engine that waits must not push what led to it out of the ring.
    """
    return type(message) is StepScheduled and not (
        message.progress or message.preempted or message.handed_out
    )


def take_waiting(feed: Feed[M], most: int) -> Iterator[M]:
    """Yield what waits in a feed, at most `most` messages."""
    for _ in range(most):
        try:
            yield feed.nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return


def line_of(entry: Entry) -> str:
    """Return an entry as text, without a line's end."""
    line = {"seq": entry.sequence, "t": entry.time, **to_plain(entry.message)}
    return json.dumps(line, separators=(",", ":"))
