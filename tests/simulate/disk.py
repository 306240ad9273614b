"""A disk with random faults, and the threads that use it. The files are real, but calls take simulated time.

    loop ──resume──▶ a thread runs up to its next disk call ──park──▶ loop ──a timer──▶ the call, and on

Only one thread runs at a time, so that runs are reproducible. The engine's own thread must not call the disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvoffload.disk import folder, index, open_folder, slot_file
from tests.disk.recorded_os import Disk, Inode, RecordedOs
from tests.simulate.copier import fate_of
from tests.simulate.loop import SimLoop, SimPortal

if TYPE_CHECKING:
    import random

DISK_TROUBLES: dict[str, dict[str, float]] = {
    "none": {},
    "some": {"error": 0.03, "full": 0.02, "short": 0.1, "flip": 0.03, "lost": 0.03},
    "failing": {"error": 0.3, "full": 0.1},
    "lying": {"flip": 0.2, "lost": 0.2, "short": 0.2},
    "hanging": {"hang": 0.08, "error": 0.02},
}


@dataclass(frozen=True)
class DiskOdds:
    """The probabilities of the disk's faults. Times are in seconds."""

    error: float = 0.0  # the call does a part of its work, and reports an error
    full: float = 0.0  # the call does nothing, and reports a full disk
    short: float = 0.0  # the call does a part of its work, and reports how much
    flip: float = 0.0  # a wrong bit is written or read
    lost: float = 0.0  # the call does nothing, and reports success
    hang: float = 0.0  # the call returns when the run is over
    usual_s: float = 0.001  # the maximum duration of a call that does not hang


class Killed(BaseException):
    """Raised in a thread that waits for the disk when the thread's process is killed."""


class SimThread:
    """A thread that runs only while the loop's thread waits for this thread to pause.

    The loop's timers resume it, and it calls `ended` at the end of each piece of work.
    """

    _here = threading.local()

    def __init__(self, loop: SimLoop, ended: Callable[[], None], owner: object) -> None:
        self._loop = loop
        self.owner = owner
        self._ended = ended
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], None] | None = None
        self._is_killed = False
        self.timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def current(cls) -> SimThread | None:
        return getattr(cls._here, "thread", None)

    @property
    def now(self) -> float:
        return self._loop.now

    @property
    def is_idle(self) -> bool:
        return self._work is None

    @property
    def hangs(self) -> bool:
        return self._work is not None and self.timer is None

    def start(self, work: Callable[[], None], seconds: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._work = work
        self.timer = self._loop.call_later(seconds, self.resume)

    def resume(self) -> None:
        """Let this thread run until its next call or the end of its work. Called only by the loop."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None
        self._go.release()
        self._back.acquire()
        if self.is_idle and not self._is_killed:
            self._ended()

    def park(self, seconds: float | None) -> None:
        """Wait for some seconds, or forever if None. Only the simulated thread itself may call this."""
        if seconds is not None:
            self.timer = self._loop.call_later(seconds, self.resume)
        self._back.release()
        self._go.acquire()
        if self._is_killed:
            raise Killed

    def kill(self) -> None:
        """End the simulated thread while it waits. Only the loop may call this."""
        if not self._is_killed:
            self._is_killed = True
            if self._thread is not None:
                self.resume()

    def _run(self) -> None:
        SimThread._here.thread = self
        while True:
            self._go.acquire()
            if self._is_killed or self._work is None:
                break
            try:
                self._work()
            finally:
                self._work = None
                if not self._is_killed:
                    self._back.release()
            if self._is_killed:
                break
        self._back.release()


class SimExecutor(Executor):
    """Several `SimThread`s with one queue of work. `problems` receives the exceptions of all work."""

    def __init__(self, loop: SimLoop, draws: random.Random, threads: int, problems: list[str]) -> None:
        self.loop, self._draws, self._problems = loop, draws, problems
        self.threads = [SimThread(loop, self._next, self) for _ in range(threads)]
        self._queue: deque[Callable[[], None]] = deque()
        self._is_killed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        future = _Waited(self)

        def work() -> None:
            try:
                result = fn(*args, **kwargs)
            except Killed:
                return
            except BaseException as error:
                self._problems.append(f"{getattr(fn, '__qualname__', fn)} raised {error!r}")
                future.set_exception(error)
            else:
                future.set_result(result)

        if not self._is_killed:
            self._queue.append(work)
            self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: queued work still runs."""

    def kill(self) -> None:
        self._is_killed = True
        for thread in self.threads:
            thread.kill()

    def release(self) -> None:
        for thread in self.threads:
            if thread.hangs:
                thread.resume()

    def _next(self) -> None:
        idle = [thread for thread in self.threads if thread.is_idle]
        if idle and self._queue:
            idle[0].start(self._queue.popleft(), self._draws.random() * 0.0005)


class _Waited(Future[Any]):
    def __init__(self, executor: SimExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:  # noqa: ANN401
        _drive(self._executor.loop, self._executor.threads, self, timeout)
        return super().result(0)


def _drive(loop: SimLoop, threads: Sequence[SimThread], future: Future[Any], timeout: float | None) -> None:
    """Let time pass for these threads until their work is done, as if the engine's thread waited."""
    until = loop.now + (1e9 if timeout is None else timeout)
    while not future.done():
        timers = [thread for thread in threads if thread.timer is not None]
        first = min(timers, key=lambda thread: thread.timer.when(), default=None)  # type: ignore[union-attr]
        if first is None or first.timer is None or first.timer.when() > until:
            loop.now = until
            raise TimeoutError
        loop.now = max(loop.now, first.timer.when())
        first.resume()


class DiskPortal(SimPortal):
    """The portal of one of several engines that share a loop. Closing or killing it ends only its own tasks."""

    def __init__(self, loop: SimLoop, draws: random.Random, problems: list[str]) -> None:
        super().__init__(loop)
        self._draws = draws
        self._problems = problems
        self._executors: list[SimExecutor] = []
        self._own: list[Future[Any]] = []

    def new_executor(self, purpose: str, threads: int = 1) -> Executor:
        executor = SimExecutor(self.loop, self._draws, threads, self._problems)
        self._executors.append(executor)
        return executor

    def spawn(self, async_fn: Any, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        future: Future[Any] = super().spawn(async_fn, *args, **kwargs)
        self._own.append(future)
        return future

    def close(self, timeout: float = 10.0) -> bool:
        tasks = [each._task for each in self._own if not each._task.done()]  # type: ignore[attr-defined]
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        return True

    def kill(self) -> None:
        """Kill the process that owns the portal's threads."""
        for executor in self._executors:
            executor.kill()
        self.close()

    def drive(self, future: Future[Any], timeout: float | None) -> None:
        _drive(self.loop, [thread for each in self._executors for thread in each.threads], future, timeout)

    def release(self) -> None:
        for executor in self._executors:
            executor.release()


class SimDisk(RecordedOs):
    """Replaces the module `os` for the files below `root`, the tier's `disk_path`."""

    def __init__(self, root: Path, draws: random.Random, odds: DiskOdds) -> None:
        super().__init__(Disk(), lambda: None)
        self.root = root
        self._draws = draws
        self._odds = odds
        self._open_files: set[int] = set()
        self.is_gone = False
        self.has_lied = False

    def token_bytes(self, size: int) -> bytes:
        """Stand in for `secrets.token_bytes`."""
        return self._draws.randbytes(size)

    # -- calls ----------------------------------------------------------------------------------------------------

    def open(self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._wait(("error", "full"))
        descriptor = super().open(path, flags, mode, dir_fd=dir_fd)
        self._open_files.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open_files.discard(descriptor)
        open_folder._LOCKED.discard(descriptor)
        os.close(descriptor)

    def fdopen(self, descriptor: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._open_files.discard(descriptor)
        return os.fdopen(descriptor, *args, **kwargs)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        return self.pwritev(descriptor, [data], offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        fate = self._wait(("error", "full", "short", "flip", "lost"), does_part=True)
        data = bytearray(b"".join(map(bytes, buffers)))
        if fate == "lost":
            return len(data)
        if fate == "flip":
            self._flip(data)
        if fate in ("error", "short"):
            del data[self._draws.randint(1, len(data)) :]
        written = super().pwritev(descriptor, [memoryview(data)], offset)
        if fate == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.preadv(descriptor, [memoryview(data)], offset)])

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        fate = self._wait(("error", "short", "flip"))
        count = os.preadv(descriptor, buffers, offset)
        if fate == "flip" and count:
            data = bytearray(b"".join(map(bytes, buffers)))[:count]
            self._flip(data)
            for buffer in buffers:
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                del data[:size]
        return self._draws.randint(1, count) if fate == "short" and count else count

    def fdatasync(self, descriptor: int) -> None:
        if self._wait(("error", "lost")) != "lost":
            super().fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        if self._wait(("error", "lost")) == "lost":
            return
        super().fsync(descriptor)
        place = self._place()
        for name in list(self._disk.names):
            if place is not None and not (place / name).exists():
                del self._disk.names[name]  # the sync has made the file's removal durable

    def rename(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._wait(("error",))
        super().rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        self._wait(("error", "full"))
        super().posix_fallocate(descriptor, offset, size)

    # -- crashes and recovery -------------------------------------------------------------------------------------

    def process_dies(self) -> None:
        """Close and unlock the process's files, as the end of the process would."""
        for descriptor in list(self._open_files):
            self.close(descriptor)

    def power_fails(self) -> None:
        """Lose, tear or reorder writes that were not synced."""
        place, found = self._place(), Disk()
        if place is None:
            return
        for path in place.iterdir():
            path.unlink()
        self._disk.left(self._draws, place)
        for path in sorted(place.iterdir()):
            number = path.stat().st_ino
            found.names[path.name] = number
            found.inodes[number] = Inode(durable=bytearray(path.read_bytes()))
        self._disk = found

    def rots(self) -> None:
        place = self._place()
        for path in sorted(place.iterdir()) if place is not None else ():
            data = bytearray(path.read_bytes())
            for _ in range(self._draws.randint(0, 3)):
                if data:
                    self._flip(data)
            with path.open("r+b") as file:
                file.write(data)

    def _place(self) -> Path | None:
        return next(iter(self.root.glob("*/replica0")), None)

    def _flip(self, data: bytearray | memoryview) -> None:
        data[self._draws.randrange(len(data))] ^= 1 << self._draws.randrange(8)

    def _wait(self, fates: Sequence[str], *, does_part: bool = False) -> str:
        """Wait for the simulated duration of a call; return the call's outcome.

        Raises:
            OSError: the disk is gone or full, or the call fails. With `does_part`, a failure is returned
                instead.
        """
        thread = SimThread.current()
        assert thread is not None, "the engine's thread calls the disk"
        fate = fate_of(self._draws, self._odds, (*fates, "hang"))
        thread.park(None if fate == "hang" else self._draws.uniform(0, self._odds.usual_s))
        if self.is_gone:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        if fate == "full" or (fate == "error" and not does_part):
            number = errno.ENOSPC if fate == "full" else errno.EIO
            raise OSError(number, os.strerror(number))
        self.has_lied |= fate == "lost"
        return fate

    def heals(self) -> None:
        """Cause no more faults, because the run is over."""
        self._odds = DiskOdds()


@contextmanager
def in_place_of_os(disk: SimDisk) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (folder, index, open_folder, slot_file):
            stack.enter_context(mock.patch.object(module, "os", disk))
        for module in (index, slot_file):
            stack.enter_context(mock.patch.object(module, "secrets", disk))
        yield
