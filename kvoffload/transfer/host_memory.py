"""Limits and allocates this process's host memory, on the GPU's NUMA node.

Copies between the GPU and another NUMA node cross a second, slower bus. So the thread that first touches the memory
does so on a processor of the GPU's node, if the process may use one. Docker's default profile allows this, but not
`mbind`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from kvoffload.logs import get_logger
from kvoffload.model.config import ADVICE, SETTINGS, OffloadConfig, size_text
from kvoffload.model.errors import ConfigError, HostMemoryError
from kvoffload.transfer.host_file import HostFile, advise

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Executor, Future

    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.ports import ReadText

log = get_logger("transfer")

_KEPT: list[object] = []  # memory that a device may still access, so it must not be released
RESERVE = 256 * 2**20
"""Bytes that stay free, at the start and while arenas grow.

This is more than a chunk, because several ranks may check at the same time.
"""
_AMPLE = 3  # the host memory that README.md advises, as a multiple of the device's KV cache
SMALL_HOST = 1.6
"""Host memory of up to this multiple of the device's KV cache had 1.2 times as many hits with "lazy" as with "eager", and more
(tests/bench/README.md)."""
_NO_LIMIT = 2**60  # cgroup version 1 reports "no limit" as a number above this, version 2 as "max"


def read_file(path: str) -> str | None:
    """Return a file's text, or None if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class HostChunk:
    """One piece of host memory.

    Args:
        address: address of the first byte.
        size: number of bytes.
        release: frees the memory; called once, when no copy can touch the memory any more.
    """

    address: int
    size: int
    release: Callable[[], None]


class HostAllocator(Protocol):
    """Allocates host memory that is ready for copies at full speed."""

    async def allocate(self, size: int, first: int = 0) -> HostChunk:
        """Return `size` bytes with every page present (and pinned, if the device needs that).

        Args:
            size: the chunk's bytes.
            first: the chunk's first slot.

        Raises:
            HostMemoryBusy: the memory cannot be pinned now; a later call may succeed.
            HostMemoryError: the allocation fails.
        """
        ...


class Pin(Protocol):
    """Pins host memory for a device."""

    def register(self, address: int, size: int) -> None:
        """Pin the memory.

        Raises:
            HostMemoryBusy: the device's driver cannot pin memory now; a later call may succeed.
            HostMemoryError: the driver refuses.
        """
        ...

    def unregister(self, address: int) -> bool:
        """Undo `register`. Return False if the driver refuses, so that the device may still access the memory."""
        ...


@dataclass(frozen=True)
class MmapAllocator:
    """Allocates anonymous memory, or memory in a file.

    `executor`'s threads touch and pin it, so that no event loop waits for the kernel.

    These threads also release pinned memory, chunk by chunk. An engine that stops waits only a few seconds for its
    workers; memory that is still pinned after that is freed with the process. Forked children do not get the memory,
    and core dumps leave it out.

    Args:
        executor: its threads do the work.
        pin: pins the memory for a device; None if the device is the CPU.
        node: the NUMA node to allocate from; None leaves the choice to the kernel.
        read: reads the kernel's files; tests pass their own.
        file: the file that has the memory; None for anonymous memory.
    """

    executor: Executor
    pin: Pin | None = None
    node: PreferredNode | None = None
    read: ReadText = read_file
    file: HostFile | None = None

    async def allocate(self, size: int, first: int = 0) -> HostChunk:
        work = self.executor.submit(self._allocate, size, first)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            # The thread cannot be stopped. The chunk that it allocates is released when the thread has finished.
            work.add_done_callback(_release_result)
            raise

    def _allocate(self, size: int, first: int = 0) -> HostChunk:
        # Ranks and engines that start together all count the same memory as free. Without a check before each chunk,
        # the kernel could run out of memory and kill one of them.
        left = available_bytes(self.read)
        is_new = self.file is None or not (self.file.is_set_aside or self.file.has(first, size))
        if is_new and left is not None and left < size + RESERVE:
            raise HostMemoryError(
                f"{left} bytes are left on this machine or in this process's cgroup; {size} more would leave others less "
                f"than {RESERVE}"
            )
        with nullcontext() if self.node is None else self.node.processors():
            if self.file is None:
                memory: mmap.mmap | HostFile = _anonymous(size)
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[arg-type]
                ctypes.memset(address, 0, size)  # touches every page, and releases the GIL
            else:
                memory, address = self.file, self.file.take(first, size)
        if self.pin is not None:
            try:
                self.pin.register(address, size)
            except BaseException:
                _close(memory)  # Close the memory now, because the error's traceback would keep it.
                raise
        return HostChunk(address, size, lambda: self._release(address, memory))

    def _release(self, address: int, memory: mmap.mmap | HostFile) -> None:
        if self.pin is None:
            _close(memory)
            return
        try:
            self.executor.submit(_unpin, self.pin, address, memory)
        except RuntimeError:  # the executor was shut down
            _unpin(self.pin, address, memory)


def _anonymous(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(f"the system refused {size} bytes of host memory: {error}") from error
    advise(memory)
    return memory


def _close(memory: mmap.mmap | HostFile) -> None:
    """Unmap anonymous memory. A file is unmapped as a whole, when nothing refers to it any more."""
    if isinstance(memory, mmap.mmap):
        memory.close()


def _unpin(pin: Pin, address: int, memory: mmap.mmap | HostFile) -> None:
    if pin.unregister(address):
        _close(memory)
    else:  # The device may still write here, so the addresses must not be reused.
        _KEPT.append(memory)


def preferred_node(pci_address: str, read: ReadText = read_file) -> PreferredNode | None:
    """Return the NUMA node of a PCI device; None if the kernel reports none, for example on a machine with one node.

    Args:
        pci_address: the device's address, such as "0000:3b:00.0".
        read: reads the kernel's files; tests pass their own.
    """
    path = f"/sys/bus/pci/devices/{pci_address.lower()}/numa_node"
    node = _number(read(path))
    return None if node is None else PreferredNode(node, read)


@dataclass
class PreferredNode:
    """Moves threads to a NUMA node. Memory that they touch first is then allocated there, unless the node is full.

    Args:
        node: the node's number.
        read: reads the kernel's files; tests pass their own.
        was_logged: whether the first outcome was logged.
    """

    node: int
    read: ReadText = read_file
    was_logged: bool = False

    @contextmanager
    def processors(self) -> Iterator[None]:
        """Run the calling thread on the node's processors within the context, unless the system refuses.

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

    def allowed_processors(self) -> set[int]:
        """Return the node's processors that the calling thread may use.

        Raises:
            ValueError: the kernel does not list the node's processors.
        """
        text = self.read(f"/sys/devices/system/node/node{self.node}/cpulist") or ""
        return os.sched_getaffinity(0) & _processors(text)

    def _move_here(self) -> set[int] | None:
        """Move the thread to the node's processors.

        Return the thread's former processors, or None if the system refuses.
        """
        try:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self.allowed_processors())
        except (OSError, ValueError, AttributeError):
            # `OSError` can also mean that the process may use none of the node's processors.
            return None
        return before


def slots_for(
    bytes_per_rank: int, layout: DeviceLayout, *, ranks: int = 1, kept: int = 0, read: ReadText = read_file
) -> int:
    """Return how many host slots fit into `bytes_per_rank`.

    Args:
        bytes_per_rank: bytes of host memory that this rank may use.
        layout: the rank's device layout.
        ranks: how many ranks on this machine will each use `bytes_per_rank` of the memory that is free now.
        kept: bytes that the ranks' files have already.
        read: reads the kernel's files; tests pass their own.

    Raises:
        ConfigError: less than one block fits, or the ranks would leave this machine or this process's cgroup less than
            `RESERVE` bytes.
    """
    slots = bytes_per_rank // layout.slot_bytes
    if not slots:
        problem = (
            f"host_bytes gives each rank {bytes_per_rank} bytes, below one block of {layout.slot_bytes} bytes"
        )
        raise ConfigError([problem])
    needed = ranks * slots * layout.slot_bytes
    if (limit := exceeded(needed - kept, memory_limits(read))) is not None:
        together = "" if ranks == 1 else f", all {ranks} ranks of this machine {size_text(needed)}"
        given = f"host_bytes gives each rank {size_text(bytes_per_rank)}{together}"
        raise ConfigError([f"{given}, above {limit}; {size_text(RESERVE)} must stay free"])
    return slots


def fits(needed: int, read: ReadText = read_file) -> bool:
    """Return whether this machine and this process's cgroup have `needed` bytes left, and `RESERVE`."""
    return exceeded(needed, memory_limits(read)) is None


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much memory a process can still allocate on the machine or within one of its memory cgroups.

    Args:
        place: the machine or the cgroup, as error messages name it.
        left: bytes left; file cache counts as free.
    """

    place: str
    left: int

    def __str__(self) -> str:
        return f"the {size_text(self.left)} that {self.place} has left now"


def exceeded(needed: int, limits: Iterable[MemoryLimit]) -> MemoryLimit | None:
    """Return the tightest limit that would have less than `RESERVE` left after `needed` bytes, or None."""
    above = [limit for limit in limits if limit.left < needed + RESERVE]
    return min(above, key=lambda limit: limit.left, default=None)


def memory_limits(read: ReadText) -> list[MemoryLimit]:
    """Return the limits of the machine and of every enclosing memory cgroup, as far as the kernel reports them."""
    kilobytes = _number(_fields(read("/proc/meminfo")).get("MemAvailable:"))
    machine = [] if kilobytes is None else [MemoryLimit("the machine", 1024 * kilobytes)]
    return [*machine, *_cgroup_limits(read)]


def available_bytes(read: ReadText) -> int | None:
    """Return how many bytes this process can still allocate without swapping, or None if the kernel does not report it.

    The number is the minimum of MemAvailable and of the bytes left in each enclosing cgroup (version 1 or 2). File
    cache counts as free.
    """
    return min([limit.left for limit in memory_limits(read)], default=None)


def advise_host_bytes(
    ranks: int,
    device_bytes: int | None = None,
    local_ranks: int | None = None,
    raw: Mapping[str, object] | None = None,
    read: ReadText = read_file,
) -> str:
    """Return what this machine has left and what to set `host_bytes` to, for the error if the setting is missing.

    Args:
        ranks: the engine's number of ranks.
        device_bytes: bytes of the KV cache of all ranks together, if they are known.
        local_ranks: the number of the engine's ranks on this machine, by default all.
        raw: the operator's keys and values, not yet checked.
        read: reads the kernel's files; tests pass their own.
    """
    limit = min(memory_limits(read), key=lambda one: one.left, default=None)
    if limit is None:
        return ADVICE
    local_ranks = local_ranks or ranks
    left = f"{limit.place} has {size_text(limit.left)} left for {local_ranks} rank{'s' * (local_ranks > 1)}"
    # The doctor's check requires that a tenth stays free.
    most = min(limit.left * 9 // 10, limit.left - RESERVE) // local_ranks * ranks
    if most <= 0:
        return f"{left}, and {size_text(RESERVE)} must stay free: give it more memory"
    if device_bytes is None:
        return f"{left}; {ADVICE}, at most {size_text(most)}"
    advised = min(_AMPLE * device_bytes, most)
    times = advised / device_bytes
    given: dict[str, Any] = {name: value for name, value in (raw or {}).items() if name in SETTINGS}
    config = OffloadConfig(**{**given, "host_bytes": advised})
    policy = f", with store_policy {small_host_policy(config)}" if times < SMALL_HOST else ""
    return f"{left}; advised: {size_text(advised)}, {times:.1f} times the device's KV cache{policy}; at most {size_text(most)}"


def small_host_policy(config: OffloadConfig) -> str:
    """Return the `store_policy` to advise for host memory below `SMALL_HOST` times the device's KV cache.

    `auto` stays `eager` where another process may find the blocks, and with recurrent layers, which are not known here.
    """
    return "lazy" if config.outlives_engine else "auto (lazy with recurrent layers)"


def _cgroup_limits(read: ReadText) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's memory cgroups (version 1 or 2) and their parents, if they can be read."""
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
    """Yield the limits of the cgroup and of each parent. A container may see its own cgroup as the root."""
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
    """Return the second word of each line, by the line's first word."""
    lines = [line.split() for line in (text or "").splitlines()]
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _release_result(work: Future[HostChunk]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()


def _processors(text: str) -> set[int]:
    """Return the processor numbers in a list such as "0-3,8"."""
    spans = [part.partition("-")[::2] for part in text.strip().split(",")]
    return {number for first, last in spans for number in range(int(first), int(last or first) + 1)}
