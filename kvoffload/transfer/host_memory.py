"""How much host memory this process may use, how it is allocated, and on which NUMA node.

Copies from another node than the GPU's cross a second, slower bus. So the thread that first touches the memory runs on the
node's processors while it does so, where they are among the process's. Unlike `mbind`, Docker's default profile allows that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from kvoffload.logs import get_logger
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError, HostMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Executor, Future

    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import ReadText

log = get_logger("transfer")

_KEPT: list[object] = []  # memory that a device may still reach
_RESERVE = 256 * 2**20
"""Bytes left free while an arena grows: some chunks, since several ranks may check at the same time."""
_NO_LIMIT = 2**60  # version 1 writes no limit as a number that no machine has, version 2 as "max"


def read_file(path: str) -> str | None:
    """Return a file's text, None where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class HostChunk:
    """One piece of host memory.

    Args:
        address: its first byte.
        size: its bytes.
        release: gives it back; called once, and not while a copy may touch it.
    """

    address: int
    size: int
    release: Callable[[], None]


class HostAllocator(Protocol):
    """Allocates host memory that is ready for copies at full speed."""

    async def allocate(self, size: int) -> HostChunk:
        """Return `size` bytes, every page of them present (and pinned, where the device wants that).

        Raises:
            HostMemoryBusy: not now; a later call may succeed.
            HostMemoryError: they cannot be allocated.
        """
        ...


class Pin(Protocol):
    """Makes memory known to a device."""

    def register(self, address: int, size: int) -> None:
        """Pin the memory.

        Raises:
            HostMemoryBusy: the device's driver refuses for now.
            HostMemoryError: it refuses.
        """
        ...

    def unregister(self, address: int) -> bool:
        """Undo `register`; False where the driver refuses, so that the device may still reach the memory."""
        ...


@dataclass(frozen=True)
class MmapAllocator:
    """Anonymous memory, touched and pinned on `executor`'s threads so that no loop waits for the kernel.

    Pinned memory is released there too, chunk by chunk: an engine that ends waits a few seconds for its workers, and what is
    pinned by then goes with the process. A forked child does not get the memory, and core dumps leave it out.

    Args:
        executor: its threads do the work.
        pin: registers the memory with a device; None where the device is the CPU.
        node: where the memory should lie; None leaves that to the kernel.
        read: reads the kernel's files; tests hand in their own.
    """

    executor: Executor
    pin: Pin | None = None
    node: PreferredNode | None = None
    read: ReadText = read_file

    async def allocate(self, size: int) -> HostChunk:
        work = self.executor.submit(self._allocate, size)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            # The thread cannot be stopped, so what it allocates is released when it ends.
            work.add_done_callback(_release_result)
            raise

    def _allocate(self, size: int) -> HostChunk:
        # Ranks and engines that start together each see the same memory as free; the kernel would end one of them.
        left = available_bytes(self.read)
        if left is not None and left < size + _RESERVE:
            raise HostMemoryError(
                f"{left} bytes are left on this machine or in this process's cgroup; {size} more would leave others less "
                f"than {_RESERVE}"
            )
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(f"the system refused {size} bytes of host memory: {error}") from error
        _advise(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # Touches every page, outside the interpreter's lock.
        with nullcontext() if self.node is None else self.node.processors():
            ctypes.memset(address, 0, size)
        if self.pin is not None:
            try:
                self.pin.register(address, size)
            except BaseException:
                memory.close()  # at once: the traceback would keep it for as long as someone holds the error
                raise
        return HostChunk(address, size, lambda: self._release(address, memory))

    def _release(self, address: int, memory: mmap.mmap) -> None:
        if self.pin is None:
            memory.close()
            return
        try:
            self.executor.submit(_unpin, self.pin, address, memory)
        except RuntimeError:  # the executor was shut down
            _unpin(self.pin, address, memory)


def _unpin(pin: Pin, address: int, memory: mmap.mmap) -> None:
    if pin.unregister(address):
        memory.close()
    else:  # the device may write here: the addresses must not become someone else's
        _KEPT.append(memory)


def preferred_node(pci_address: str, read: ReadText = read_file) -> PreferredNode | None:
    """Return the NUMA node that a PCI device sits at; None where there is only one, or the kernel does not say.

    Args:
        pci_address: as in "0000:3b:00.0".
        read: reads the kernel's files; tests hand in their own.
    """
    path = f"/sys/bus/pci/devices/{pci_address.lower()}/numa_node"
    node = _number(read(path))
    return None if node is None else PreferredNode(node)


@dataclass
class PreferredNode:
    """Takes memory from one node. A page lies on the node of the thread that first touches it, unless that is full.

    Args:
        node: its number.
        read: reads the kernel's files; tests hand in their own.
        was_logged: whether the first outcome was.
    """

    node: int
    read: ReadText = read_file
    was_logged: bool = False

    @contextmanager
    def processors(self) -> Iterator[None]:
        """Run the calling thread on the node's processors within the context, unless that is refused.

        The first outcome is logged.
        """
        before = self._move_here()
        if not self.was_logged:
            self.was_logged = True
            log.info("host_memory_node", node=self.node, touched_there=before is not None)
        try:
            yield
        finally:
            if before is not None:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, before)

    def _move_here(self) -> set[int] | None:
        """Return where the thread ran before, None if moving it is refused."""
        try:
            text = self.read(f"/sys/devices/system/node/node{self.node}/cpulist") or ""
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, before & _processors(text))
        except (OSError, ValueError, AttributeError):  # also where none of them may be used
            return None
        return before


def slots_for(
    bytes_per_rank: int, layout: DeviceLayout, *, ranks: int = 1, read: ReadText = read_file
) -> int:
    """Return how many host slots fit `bytes_per_rank`.

    Args:
        bytes_per_rank: host memory that this rank may use.
        layout: of this rank.
        ranks: how many ranks of this machine take as much each from what is left now.
        read: reads the kernel's files; tests hand in their own.

    Raises:
        ConfigError: less than one block fits, or the ranks need more than this machine or this process's cgroup has left.
    """
    slots = bytes_per_rank // layout.slot_bytes
    if not slots:
        problem = (
            f"host_bytes gives each rank {bytes_per_rank} bytes, below one block of {layout.slot_bytes} bytes"
        )
        raise ConfigError([problem])
    needed = ranks * slots * layout.slot_bytes
    if (limit := exceeded(needed, memory_limits(read))) is not None:
        together = "" if ranks == 1 else f", all {ranks} ranks of this machine {size_text(needed)}"
        raise ConfigError([f"host_bytes gives each rank {bytes_per_rank} bytes{together}, above {limit}"])
    return slots


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much memory a process can still get from the machine, or within one of its memory cgroups.

    Args:
        place: the machine or the cgroup.
        left: bytes, file cache counted as free.
    """

    place: str
    left: int

    def __str__(self) -> str:
        return f"the {size_text(self.left)} that {self.place} has left now"


def exceeded(needed: int, limits: Iterable[MemoryLimit]) -> MemoryLimit | None:
    """Return the tightest of the limits that so many bytes exceed; None where they fit all of them.

    The start and the doctor decide by it.
    """
    above = [limit for limit in limits if limit.left < needed]
    return min(above, key=lambda limit: limit.left, default=None)


def memory_limits(read: ReadText) -> list[MemoryLimit]:
    """Return the limits of the machine and of every enclosing memory cgroup, as far as the kernel reports them."""
    kilobytes = _number(_fields(read("/proc/meminfo")).get("MemAvailable:"))
    machine = [] if kilobytes is None else [MemoryLimit("the machine", 1024 * kilobytes)]
    return [*machine, *_cgroup_limits(read)]


def available_bytes(read: ReadText) -> int | None:
    """Return the bytes that this process can still get without swapping, None where the kernel does not say.

    The least of MemAvailable and what every enclosing cgroup (version 1 or 2) has left, file cache counted as free.
    """
    return min([limit.left for limit in memory_limits(read)], default=None)


def _cgroup_limits(read: ReadText) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's memory cgroups (version 1 or 2), the parents too, as far as they can be read."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not path.startswith("/"):
            continue
        if controllers == "":
            yield from _chain(read, "/sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _chain(read, "/sys/fs/cgroup/memory", path, *names)


def _chain(read: ReadText, root: str, path: str, limit: str, usage: str) -> Iterator[MemoryLimit]:
    """Yield the limits of the cgroup and each of its parents. A container may see its own group as the root."""
    group = PurePosixPath(path)
    for parent in (group, *group.parents):
        folder = root + str(parent).rstrip("/")
        limit_bytes, used_bytes = _number(read(f"{folder}/{limit}")), _number(read(f"{folder}/{usage}"))
        if limit_bytes is None or limit_bytes >= _NO_LIMIT or used_bytes is None:
            continue
        counts = _fields(read(f"{folder}/memory.stat"))
        cached = _number(counts.get("total_inactive_file", counts.get("inactive_file"))) or 0
        yield MemoryLimit(f"the cgroup {folder}", max(limit_bytes - used_bytes + cached, 0))


def _number(text: str | None) -> int | None:
    digits = (text or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 25 else None


def _fields(text: str | None) -> dict[str, str]:
    """Return the second word of each line, by the first."""
    lines = [line.split() for line in (text or "").splitlines()]
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _advise(memory: mmap.mmap) -> None:
    """Ask for huge pages, and keep the memory out of forks and core dumps.

    Huge pages need fewer address translations for scattered copies. Pinned pages would be copied at each fork. A refusal
    does no harm.

    khugepaged scans memory so marked under the lock of the process's mappings. `MADV_COLLAPSE` would avoid the scans, but holds
    that lock while it waits for a kernel thread on every processor, which took up to 6 s beside vLLM's spinning threads.
    """
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, name))


def _release_result(work: Future[HostChunk]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()


def _processors(text: str) -> set[int]:
    """Return the numbers in a list such as "0-3,8"."""
    spans = [part.partition("-")[::2] for part in text.strip().split(",")]
    return {number for first, last in spans for number in range(int(first), int(last or first) + 1)}
