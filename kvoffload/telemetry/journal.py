"""The journal: keeps the last messages in memory for error reports, and optionally writes all messages to a file.

The journal keeps batches of messages in a ring buffer and turns a message into text only when the message is read.
Without a file, it moves batches to the ring at each `Tick`, which is faster; with a file, at once.

A task on the observers' event loop takes messages from a feed and writes them to the file on a worker thread, so that
neither the engine nor another observer waits for a disk. If the feed is full, lines are dropped, and the sequence
numbers in the file have a gap. Each file begins with the provenance.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from math import inf
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from kvoffload.bus.bus import Batch, Bus, Tick
from kvoffload.bus.current_hook import CurrentHook
from kvoffload.bus.feed import Feed
from kvoffload.bus.guard import call_guarded
from kvoffload.model.errors import ConfigError
from kvoffload.model.facts import StepScheduled, TierRestored
from kvoffload.telemetry.records import BEGUN, rotated, summary_of, to_plain

_BATCH = 1024  # the maximum number of entries in one write
_PART = 64  # how many batches move to the ring at a `Tick`, if no more than four times as many wait
_OWNERS = 0o600

Entry = tuple[int, float, object]
"""A line of the journal that is not yet text: the sequence number, the time in unix seconds and the message."""


class Journal:
    """Keeps the last messages of one engine, and optionally writes all of them to a file.

    Args:
        hook: the current hook, whose time is the time of its messages.
        ring_size: the number of batches to keep in memory.
        path: the file to append to; None for no file.
        max_bytes: the maximum size of the file and the rotated file together; None for no maximum.
        provenance: the content of each file's first line; None for no such line.
        on_failure: called with the first error from writing the file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        hook: CurrentHook,
        *,
        ring_size: int = 256,
        path: Path | None = None,
        max_bytes: int | None = None,
        provenance: Mapping[str, object] | None = None,
        on_failure: Callable[[Exception], object] | None = None,
    ) -> None:
        self._hook = hook
        self._ring: deque[Batch] = deque(maxlen=ring_size)
        # The batches that are not in the ring yet. If nothing moves them, the oldest are dropped.
        self._young: deque[Batch] = deque(maxlen=16 * ring_size)
        self._is_large = False  # whether one of them has a part of a tier's index
        head = _head(provenance, hook.unix(hook.now)) if provenance else ""
        self._file = JournalFile(path, max_bytes, head) if path is not None else None
        self._feed: Feed[Entry] | None = None
        self._on_failure = on_failure

    def subscribe(self, bus: Bus, capacity: int = 4096) -> None:
        """Start to record the bus's facts and events.

        Args:
            bus: the engine's bus.
            capacity: the maximum number of lines that wait to be written. Further lines are dropped.
        """
        bus.count(Batch, self._young.append)  # a method in C, which takes less time in hooks than one of ours
        bus.count(TierRestored, self._restored)
        if self._file is None:
            bus.count(Tick, self._tick)
        else:
            self._feed = bus.observe("journal", capacity)
            bus.count(Batch, self._written)

    def tail(self, count: int) -> list[str]:
        """Return the last `count` lines as text, the oldest first. Any thread may call this method."""
        # Copy `_young` before the ring. If a batch moves to the ring in between, both copies contain it, and its number
        # shows the duplicate. In the reverse order, both copies could miss the batch.
        young, ring = list(self._young), self._ring.copy()
        last = ring[-1].before if ring else -1
        _extend(ring, [batch for batch in young if batch.before > last])
        return [line_of(entry) for entry in self._entries(ring)[-count:]] if count else []

    async def run(self) -> None:
        """Write the file until the bus is closed. Without a file, return at once.

        A write error ends this method, but the journal in memory continues.
        """
        if self._feed is None or self._file is None:
            return
        try:
            while batch := await self._feed.take(_BATCH):
                await anyio.to_thread.run_sync(self._file.append, map(line_of, batch))
        except Exception as exc:
            if self._on_failure is not None:
                call_guarded(self._on_failure, exc)
        finally:
            self._feed.abandon()
            self._file.close()

    def _tick(self, _: Tick) -> None:
        """Move a part of the batches, so that a burst of requests makes no hook long."""
        self._move(max(_PART, len(self._young) // 4))

    def _written(self, batch: Batch) -> None:
        """Pass messages to the task that writes the file."""
        assert self._feed is not None, "this method is called only with a file"
        for entry in self._entries((batch,)):
            self._feed.offer(entry)
        self._move(1)

    def _restored(self, _: TierRestored) -> None:
        """Move all batches: the index of a tier comes in many parts, and the next batch has one."""
        self._move(len(self._young))
        self._is_large = True

    def _move(self, count: int) -> None:
        """Move the oldest batches to the ring."""
        young = self._young
        moved = [*islice(young, count)]
        _extend(self._ring, map(_without_index, moved) if self._is_large else moved)
        for _ in moved:
            young.popleft()
        self._is_large = self._is_large and bool(young)

    def _entries(self, batches: Iterable[Batch]) -> list[Entry]:
        epoch = self._hook.unix(0)
        return [
            (number, epoch + batch.at, message)
            for batch in map(_without_index, batches)
            for number, message in enumerate(batch.messages, batch.before + 1)
        ]


def _without_index(batch: Batch) -> Batch:
    """Return a batch with only a summary of each `TierRestored` fact, which is as large as a part of the tier's index."""
    messages = [summary_of(each) if type(each) is TierRestored else each for each in batch.messages]
    return Batch(batch.before, batch.at, messages)


def _extend(ring: deque[Batch], batches: Iterable[Batch]) -> None:
    """Append batches. Of consecutive idle steps, keep only the last, so that other batches stay in the ring longer.

    At no moment does the ring lack a batch that it had, because `tail` may copy the ring on another thread.
    """
    newest, was_idle = ring[-1] if ring else None, False
    for batch in batches if newest is None else [newest, *batches]:
        messages = batch.messages
        is_idle = len(messages) == 1 and type(messages[0]) is StepScheduled and messages[0].is_idle
        if is_idle and was_idle:
            ring[-1] = batch
        elif batch is not newest:
            ring.append(batch)
        was_idle = is_idle


def line_of(entry: Entry) -> str:
    """Return an entry as text, without a newline."""
    sequence, time, message = entry
    line = {"seq": sequence, "t": time, **to_plain(message)}
    return json.dumps(line, separators=(",", ":"))


def _head(provenance: Mapping[str, object], now: float) -> str:
    return json.dumps({"seq": 0, "t": now, "event": BEGUN, **provenance}, separators=(",", ":"))


# -- the file -------------------------------------------------------------------------------------------------------


class JournalFile:
    """A file of lines that only its owner can read, and only one process at a time can write.

    Another user with access to the folder could put a link in the file's place. So symbolic links, files with a second
    hard link, and files of other users are refused. If the file exists and belongs to this process's user, the process
    appends to the file and removes other users' access.

    With a maximum size, there are two files of at most half the size each. A full file gets the suffix `.1`, and
    replaces an earlier file with this suffix.

    Args:
        path: the file's path. Its folder must exist.
        max_bytes: the maximum size of the file and the rotated file together; None for no maximum.
        head: the line that the process writes first into each file; empty for no such line.

    Raises:
        ConfigError: the file cannot be opened for writing, is a link, is not a regular file, belongs to another user,
            or is locked by another process.
    """

    def __init__(self, path: Path, max_bytes: int | None = None, head: str = "") -> None:
        self.path = path
        self._file = _open(path)
        self._size = os.fstat(self._file.fileno()).st_size
        self._most = inf if max_bytes is None else max_bytes // 2
        self._head = head
        self._has_head = not head

    def append(self, lines: Iterable[str]) -> None:
        """Append lines to the file. If a line does not fit, rotate the file and write the line to the new file.

        Raises:
            OSError: the file cannot be written. Some of the lines may have been written.
            ConfigError: the file was full, and a new file cannot be opened.
        """
        for line in lines:
            if self._size and self._size + len(line) >= self._most:
                self._rotate()
            if not self._has_head:
                self._write(self._head)
                self._has_head = True
            self._write(line)
        self._file.flush()

    def close(self) -> None:
        """Close the file. Further calls have no effect."""
        with suppress(OSError):  # `append` has already raised the error
            self._file.close()

    def _write(self, line: str) -> None:
        self._size += self._file.write(f"{line}\n".encode())

    def _rotate(self) -> None:
        """Rename the full file and begin a new file. Keep the full file locked until the new file is locked."""
        os.replace(self.path, rotated(self.path))
        file = _open(self.path)
        self._file.close()
        self._file = file
        self._size = 0
        self._has_head = not self._head


def _open(path: Path) -> BinaryIO:
    try:
        file = open(path, "ab", opener=_open_ours)  # noqa: SIM115  # kept open
    except (OSError, ValueError) as error:
        is_link = getattr(error, "errno", None) == errno.ELOOP and os.path.islink(path)
        reason = "a symbolic link; name the file itself" if is_link else getattr(error, "strerror", None)
        raise _unusable(path, reason or str(error)) from error
    try:
        _claim(path, file.fileno())
    except ConfigError:
        file.close()
        raise
    return file


def _open_ours(name: str, flags: int) -> int:
    """Open a file without following a link. If the name is a pipe, do not wait for a reader."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, _OWNERS)


def _claim(path: Path, descriptor: int) -> None:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        raise _unusable(path, "not a regular file")
    if about.st_uid != os.geteuid():
        raise _unusable(path, "another user's file")
    if about.st_nlink > 1:
        raise _unusable(path, "a file with a second name (a hard link)")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, _OWNERS)  # an existing file may have other permissions
    except BlockingIOError as error:
        raise _unusable(path, "another process writes it; give each its own") from error
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError([f"journal_path {path} cannot be written: {reason}"])
