"""Loads the emulated driver (`emulator.c`), and lets tests control it.

Example:
    emulator = Emulator(build())
    emulator.reset(stepped=True, seed=1)
    engine = Engine(emulator, 0)
    engine.write(block, seed)
    engine.read(block, seed)
    emulator.step(10)
    assert not emulator.races, emulator.report
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("emulator.c")
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, RELAXED = 0, 1, 2
_INTERFACE: dict[str, tuple[object, tuple[object, ...]]] = {
    "emu_reset": (None, (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_int)),
    "emu_step": (ctypes.c_int, (ctypes.c_int,)),
    "emu_kernel": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_double),
    ),
    "emu_gate": (ctypes.c_int, (ctypes.c_void_p,)),
    "emu_open": (None, ()),
    "emu_peek": (ctypes.c_int, (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)),
    "emu_map": (ctypes.c_int, (ctypes.c_uint64, ctypes.c_int)),
    "emu_fail": (None, (ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)),
    "emu_break": (None, (ctypes.c_int, ctypes.c_int)),
    "emu_calls": (ctypes.c_long, (ctypes.c_char_p, ctypes.c_int)),
    "emu_count": (ctypes.c_uint64, (ctypes.c_int,)),
    "emu_report": (ctypes.c_char_p, ()),
    "emu_set": (None, (ctypes.c_int, ctypes.c_int)),
    "emu_time": (ctypes.c_double, (ctypes.c_double,)),
    "cuMemAlloc_v2": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_size_t)),
    "cuMemFree_v2": (ctypes.c_int, (ctypes.c_uint64,)),
    "cuCtxSetCurrent": (ctypes.c_int, (ctypes.c_void_p,)),
    "cuStreamBeginCapture_v2": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "cuStreamEndCapture": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p)),
    "cuStreamSynchronize": (ctypes.c_int, (ctypes.c_void_p,)),
    "cuStreamCreateWithPriority": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)),
    "cuMemHostRegister_v2": (ctypes.c_int, (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint)),
}


@cache
def build() -> Path:
    """Compile the emulator with gcc, once per process, because a process can load only one `libcuda.so.1`.

    Raises:
        subprocess.CalledProcessError: gcc failed; its output has the reason.
    """
    folder = Path(tempfile.mkdtemp(prefix="cuda-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


@cache
def load(library: Path) -> ctypes.CDLL:
    """Load the library. From then on, this process uses it as `libcuda.so.1`."""
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _INTERFACE.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class Emulator:
    """An emulated CUDA driver with its devices. `library` is the path that `build` returned."""

    def __init__(self, library: Path) -> None:
        self.lib = load(library)

    def reset(
        self, *, stepped: bool = False, seed: int = 1, delay_us: int = 200, version: int = 13000
    ) -> None:
        """Reset the driver.

        If `stepped`, operations run only in `step`. Otherwise each stream has a thread, with random delays of
        up to `delay_us`.
        """
        self.lib.emu_reset(stepped, seed, delay_us, version)

    def step(self, operations: int = 1_000_000) -> int:
        """Run up to `operations` pending operations; return how many were run."""
        return int(self.lib.emu_step(operations))

    @property
    def races(self) -> int:
        return int(self.lib.emu_count(0))

    @property
    def wrong(self) -> int:
        """How many reads by the engine's kernels found wrong bytes."""
        return int(self.lib.emu_count(1))

    @property
    def faults(self) -> int:
        """How many accesses were to memory that does not belong to a device and is not registered."""
        return int(self.lib.emu_count(2))

    @property
    def executed(self) -> int:
        return int(self.lib.emu_count(3))

    @property
    def waits(self) -> int:
        """How many calls waited because a stream was full."""
        return int(self.lib.emu_count(4))

    @property
    def waits_with_lock(self) -> int:
        """How many calls would have waited for a full stream while they held the GIL."""
        return int(self.lib.emu_count(5))

    @property
    def report(self) -> str:
        """A description of each race with both of its accesses, and of all other errors."""
        return str(self.lib.emu_report().decode())

    def calls(self, name: str = "", *, with_lock: bool = False) -> int:
        """Return how many calls of a driver function were made, or of all functions if there is no name.

        If `with_lock`, count only calls that held the GIL.
        """
        return int(self.lib.emu_calls(name.encode(), with_lock))

    def fail(self, name: str, code: int, *, after: int = 0, times: int = 1) -> None:
        """Make the function `name` return this error code `times` times, after `after` normal calls."""
        self.lib.emu_fail(name.encode(), code, after, times)

    def lose(self, device: int, code: int = 700) -> None:
        """Give a device a sticky error: every later call on it fails with this code."""
        self.lib.emu_break(device, code)

    def limit_batches(self, copies: int) -> None:
        """Make each batch fail after its first `copies` copies, as if out of memory. -1 removes the limit."""
        self.lib.emu_set(0, copies)

    def shift_host_addresses(self, by: int) -> None:
        self.lib.emu_set(1, by)

    def accept_pageable(self) -> None:
        self.lib.emu_set(2, 1)

    def set_architecture(self, number: int) -> None:
        self.lib.emu_set(3, number)

    def set_depth(self, operations: int) -> None:
        """Limit the number of pending operations on each stream."""
        self.lib.emu_set(4, operations)

    def refuse_pinning(self) -> None:
        """Refuse to register host memory, as a driver does under confidential computing."""
        self.lib.emu_set(5, 0)

    def gate(self, stream: int) -> None:
        """Hold the operations that are enqueued on this stream from now on, until `open` is called."""
        assert self.lib.emu_gate(stream) == 0

    def open(self) -> None:
        self.lib.emu_open()

    def advance(self, seconds: float = 0.0) -> float:
        """Advance the emulated clock; return the new time."""
        return float(self.lib.emu_time(seconds))

    @property
    def registrations(self) -> int:
        return int(self.lib.emu_registered())

    @property
    def contexts(self) -> int:
        """A bit mask of the devices that have a context."""
        return int(self.lib.emu_contexts())


class Engine:
    """A simulated engine on one device, with a stream and KV memory. Its kernels write and read blocks.

    Args:
        emulator: the emulated driver.
        device: the device's number.
        blocks: the number of blocks.
        pages: the bytes of a block in each region.
        on_default_stream: whether the engine uses the device's legacy default stream, as an engine in
            eager mode may do.
    """

    def __init__(
        self,
        emulator: Emulator,
        device: int = 0,
        blocks: int = 64,
        pages: tuple[int, ...] = (4096, 1024),
        *,
        on_default_stream: bool = False,
    ) -> None:
        from kvoffload.transfer.cuda.library import cuda_library
        from kvoffload.transfer.layout import DeviceLayout, DeviceRegion

        self._lib = emulator.lib
        cuda_library().cuInit(0)
        context = ctypes.c_void_p()
        cuda_library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._context = context.value
        self.enter()
        stream, address = ctypes.c_void_p(), ctypes.c_uint64()
        if not on_default_stream:
            self._check(self._lib.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0))
        self.stream = stream.value or 0
        regions = []
        for page in pages:
            self._check(self._lib.cuMemAlloc_v2(ctypes.byref(address), blocks * page))
            regions.append(DeviceRegion(address.value, page, page, blocks, f"cuda:{device}"))
        self.layout = DeviceLayout.of(regions)

    def enter(self) -> None:
        """Make the device current on the calling thread, as `torch.cuda.set_device` does."""
        self._check(self._lib.cuCtxSetCurrent(self._context))

    def write(self, block: int, seed: int, cost_s: float = 1e-5) -> None:
        self._launch(block, seed, True, cost_s)

    def read(self, block: int, seed: int, cost_s: float = 1e-5) -> None:
        """Launch a kernel that reads a block, and counts an error unless `write` wrote it with this seed."""
        self._launch(block, seed, False, cost_s)

    def capture(self, mode: int = CAPTURE_GLOBAL) -> None:
        """Begin to capture a graph. In the default mode, torch's, no thread may make an unsafe call until the end."""
        self.enter()
        self._check(self._lib.cuStreamBeginCapture_v2(self.stream, mode))

    def end_capture(self) -> int:
        """End the capture; return the driver's code."""
        graph = ctypes.c_void_p()
        return int(self._lib.cuStreamEndCapture(self.stream, ctypes.byref(graph)))

    def device_bytes(self) -> np.ndarray:
        """Return the bytes of the first region, without waiting for operations."""
        region = self.layout.regions[0]
        found = np.zeros(region.page_bytes * region.blocks, np.uint8)
        assert self._lib.emu_peek(region.address, found.ctypes.data, len(found))
        return found

    def synchronize(self) -> None:
        self.enter()
        self._check(self._lib.cuStreamSynchronize(self.stream))

    def release_memory(self) -> None:
        """Take the KV memory away, as vLLM does before it sleeps. Its bytes are lost, and a later use is a fault."""
        self._map(is_mapped=False)

    def restore_memory(self) -> None:
        """Give the KV memory back at the same addresses, with other bytes."""
        self._map(is_mapped=True)

    def replace_memory(self) -> None:
        """Free the KV memory, and allocate other memory of the same size."""
        self.enter()
        address, regions = ctypes.c_uint64(), []
        for region in self.layout.regions:
            self._check(self._lib.cuMemAlloc_v2(ctypes.byref(address), region.blocks * region.page_bytes))
            regions.append(replace(region, address=address.value))
        for region in self.layout.regions:
            self._check(self._lib.cuMemFree_v2(region.address))
        self.layout = replace(self.layout, regions=tuple(regions))

    def _map(self, *, is_mapped: bool) -> None:
        for region in self.layout.regions:
            assert self._lib.emu_map(region.address, is_mapped)

    def _launch(self, block: int, seed: int, writes: bool, cost_s: float) -> None:
        for number, region in enumerate(self.layout.regions):
            place = region.address + block * region.block_stride, region.page_bytes
            self._check(self._lib.emu_kernel(self.stream, *place, seed * 16 + number, writes, cost_s))

    @staticmethod
    def _check(code: int) -> None:
        assert code == 0, code
