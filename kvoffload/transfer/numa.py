"""Host memory on the GPU's own NUMA node: what lies on another one comes over a second, slower bus.

It is a preference (`MPOL_PREFERRED`): if the node is full, the kernel takes another. If the kernel refuses the call, as
under Docker's default profile, the thread that touches the memory runs on the node's processors while it does so: a
page is placed on the node of the thread that first touches it. If that is refused too, the kernel places the memory as
usual.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.logs import get_logger

if TYPE_CHECKING:
    from kvoffload.transfer.ports import ReadText

Syscall = Callable[..., int]

log = get_logger("transfer")

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_NODES = 1024  # the kernel's own limit
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(pci_address: str, read: ReadText) -> int | None:
    """Return the NUMA node that a PCI device sits at; None where there is but one, or the kernel does not say.

    Args:
        pci_address: as in "0000:3b:00.0".
        read: reads the kernel's files.
    """
    text = (read(f"/sys/bus/pci/devices/{pci_address.lower()}/numa_node") or "").strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) < _NODES else None


class PreferredNode:
    """Asks the kernel to take memory from one node.

    Args:
        node: its number.
        syscall: of the C library; None says that there is none.
        read: reads the kernel's files.
    """

    def __init__(
        self, node: int, syscall: Syscall | None = None, read: ReadText = lambda path: Path(path).read_text()
    ) -> None:
        self._node = node
        self._read = read
        self._syscall = syscall or _find_syscall()
        self._number = _MBIND.get(platform.machine())
        self._has_warned = False

    @contextmanager
    def claim(self, address: int, size: int) -> Iterator[None]:
        """Ask for the pages of a mapping that the caller touches within the context. Logs the first outcome; raises nothing."""
        try:
            problem = self._prefer(address, size)
        except Exception as error:  # where memory lies is not worth the memory
            problem = repr(error)
        before = self._move_here() if problem is not None else None
        if not self._has_warned:
            self._has_warned = True
            log.info(
                "host_memory_node",
                node=self._node,
                is_preferred=problem is None,
                touched_there=before is not None,
                reason=problem,
            )
        try:
            yield
        finally:
            if before is not None:
                with suppress(OSError):
                    os.sched_setaffinity(0, before)

    def _move_here(self) -> set[int] | None:
        """Let the calling thread run on the node's processors only; return where it ran before, None if refused."""
        try:
            text = self._read(f"/sys/devices/system/node/node{self._node}/cpulist") or ""
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, before & _processors(text))
        except (OSError, ValueError, AttributeError):  # also where none of them may be used
            return None
        return before

    def _prefer(self, address: int, size: int) -> str | None:
        """Return why the kernel refuses, None where it does not."""
        if self._syscall is None or self._number is None:
            return "this system has no mbind"
        mask = (ctypes.c_ulong * (_NODES // _WORD))()
        mask[self._node // _WORD] = 1 << self._node % _WORD
        words = (ctypes.c_long(self._number), ctypes.c_void_p(address), ctypes.c_ulong(size))
        code = self._syscall(*words, ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(_NODES), ctypes.c_uint(0))
        return os.strerror(ctypes.get_errno()) if code != 0 else None


def _processors(text: str) -> set[int]:
    """Return what a list such as "0-3,8" names."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _find_syscall() -> Syscall | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_long
    return call
