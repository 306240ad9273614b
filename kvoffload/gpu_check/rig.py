"""Host memory, device memory of one GPU, and copies between them by the copier that workers use.

Host memory is allocated as the arena allocates it. Each side has twice `Options.size` bytes. Loads use the first half
and stores use the second half, so that loads and stores can run at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.gpu_check.parts import NotHere, Options
from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.transfer.cuda.copier import CudaCopier, GpuProfile
from kvoffload.transfer.cuda.driver import CudaPin, NvidiaDriver
from kvoffload.transfer.cuda.library import CudaError
from kvoffload.transfer.host_memory import HostChunk, MmapAllocator, preferred_node
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns, array_at

# Memory of earlier rigs; it must not be released, because their copies may still run.
_KEPT: list[HostChunk] = []


class Rig:
    """Host and device memory, each with `size` bytes for loads and `size` bytes for stores.

    Args:
        options: the options of the check.
        batch_copies: the argument of the same name for `NvidiaDriver`.
        memory: the address of device memory to use; None to allocate it.
    """

    def __init__(self, options: Options, *, batch_copies: str = "on", memory: int | None = None) -> None:
        self.size = size = options.size
        self.device = options.device
        self.repeats = options.repeats
        self.driver = NvidiaDriver(options.device, lambda: self.stream, batch_copies=batch_copies)
        self.copier = CudaCopier(self.driver)
        self.stream = self.driver.stream(urgent=False)
        self.event = self.driver.event(timed=False)
        self._hook = DaemonExecutor("gpu-check-hook", threads=1)
        self._chunk = self.host_memory(2 * size, CudaPin(self.driver))
        _KEPT.append(self._chunk)
        self.host = array_at(self._chunk.address, (2 * size,), (1,))
        self.memory = memory or self.driver.allocate(2 * size, self.stream)
        self._draw = np.random.default_rng(0)
        self.settle(self.stream)  # other streams may use the memory only after its allocation has run

    def with_profile(self, profile: GpuProfile, *ways: Direction) -> CudaCopier:
        """Replace the copier by a copier that uses the page kernel for all copies in the directions `ways`.

        Raises:
            NotHere: the kernel is not available.
        """
        self.copier = CudaCopier(self.driver, profile)
        try:
            self.copier.use_kernel({way: 2**62 if way in ways else 0 for way in Direction})
        except Exception as error:
            raise NotHere(f"no page kernel, {type(error).__name__}: {error}") from error
        return self.copier

    def host_memory(self, size: int, pin: CudaPin | None = None) -> HostChunk:
        """Allocate and touch host memory, as the arena does. Pin it if `pin` is given."""
        node = preferred_node(self.driver.pci_address)
        allocator = MmapAllocator(DaemonExecutor("gpu-check-memory", threads=1), pin, node)
        return asyncio.run(allocator.allocate(size))

    def settle(self, stream: int) -> None:
        """Wait until everything that was enqueued on a stream has ended."""
        self.driver.record(self.event, stream)
        while not self.driver.has_passed(self.event):
            pass

    def runs(self, way: Direction, piece: int, count: int | None = None) -> CopyRuns:
        """Return `count` copies of `piece` bytes between random places in both memories; by default as many as fit."""
        places = self.size // piece
        half = 0 if way is Direction.LOAD else self.size
        host, device = (self._draw.permutation(places)[:count] * piece + half for _ in range(2))
        host += self._chunk.address
        device += self.memory
        size = np.full(len(host), piece, np.int64)
        return CopyRuns(device, host, size) if way is Direction.STORE else CopyRuns(host, device, size)

    def seconds(self, *copies: tuple[Direction, CopyRuns]) -> float:
        """Copy several batches at the same time. Return the seconds that the device takes for the longest batch.

        As in an engine, one thread submits the batches and another thread queries them.

        Raises:
            CopyError: the driver refuses copies.
        """
        tickets = [self._hook.submit(self.copier.submit, way, runs, ()).result() for way, runs in copies]
        pending = tickets
        # Query every pending batch, because a query also enqueues more copies of its batch.
        while pending:
            states = [(ticket, ticket.query()) for ticket in pending]
            if any(state is TicketState.FAILED for _, state in states):
                raise CopyError("the driver has refused copies; the log has its error")
            pending = [ticket for ticket, state in states if state is TicketState.PENDING]
        return max(ticket.copy_seconds or 0.0 for ticket in tickets)

    def speeds(self, piece: int, ways: Sequence[Direction]) -> list[float]:
        """Copy all memory in pieces of `piece` bytes, in all `ways` at once. Return the GB/s of each repeat."""
        found = []
        for repeat in range(self.repeats + 1):
            runs = [(way, self.runs(way, piece)) for way in ways]
            seconds = self.seconds(*runs)
            if repeat:  # the first repeat is a warm-up
                found.append(sum(one.total_bytes for _, one in runs) / seconds / 1e9)
        return found

    def wrong_bytes(self, piece: int) -> int:
        """Copy random bytes to the device and back to another place. Return how many of them come back wrong.

        Args:
            piece: the size of each copy in bytes. As many copies are made as fit into the memory.

        Raises:
            CopyError: the driver refuses copies.
        """
        there, back = np.split(self.host, 2)
        there[:] = self._draw.integers(0, 256, self.size, np.uint8)
        back[:] = 0
        load = self.runs(Direction.LOAD, piece)
        self.seconds((Direction.LOAD, load))
        self.seconds((Direction.STORE, CopyRuns(load.target, load.source + self.size, load.size)))
        there[self.size // piece * piece :] = 0  # the bytes after the last piece were not copied
        return int((there != back).sum())


def code_of(call: Callable[[], object]) -> int:
    """Make a driver call and return its error code, which is 0 if the call succeeds."""
    try:
        call()
    except CudaError as error:
        return error.code
    return 0
