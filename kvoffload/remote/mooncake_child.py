"""The child process that calls Mooncake's client for the engine's process (`mooncake.py`).

    engine's process ── control socket: one end of a new pair for each call ─▶ main thread: starts a thread per call
                     ── the other end: request ─▶ ◀─ answer ─────────────────▶ that thread: calls the client

Values are in memory that both processes map, so a request contains only names and positions in memory. The child
imports neither an engine nor torch. It exits when the control socket is closed. The kernel kills it when the thread
that started it ends, because Python code in the child could not run while the client holds the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from kvoffload.model.errors import RemoteError

_OWN_BUFFER = 16 * 2**20  # the size in bytes of the client's buffer for small objects
_SET_DEATH_SIGNAL = 1  # the kernel's constant PR_SET_PDEATHSIG
_INSTALL = "the Mooncake client cannot be loaded ({}); pip install 'kvoffload[mooncake]' (with a GPU, the wheel for its CUDA), and install the package libibverbs1"
_MOST_TEXT = 2**10  # how many characters of an error are sent
_MOST_READ = 2**10  # how many bytes of a small object are sent: an engine's own has at most 256
RAISED = b"\xc1"
"""An answer that begins with this byte is an error's text. No result in msgpack begins with it."""


def load_client() -> Any:  # noqa: ANN401  # an untyped module
    """Import and return the module of Mooncake's client.

    Raises:
        RemoteError: the client is not installed, or a library that it needs is missing.
    """
    try:
        import mooncake.store
    except ImportError as error:
        raise RemoteError(_INSTALL.format(error)) from error
    return mooncake.store


class _Client:
    """Mooncake's client, and the memory that the child shares with the engine's process."""

    def __init__(self) -> None:
        # Each shared memory's mapping and address, by its descriptor in the engine's process.
        self._memories: dict[int, tuple[mmap.mmap, int]] = {}

    def make(self, call: str, arguments: Sequence[Any], memory: int | None) -> Any:  # noqa: ANN401  # varies by call
        if call == "setup":
            return self._setup(*arguments)
        if call == "register_buffer":
            assert memory is not None, "memory comes with this call"
            return self._register(arguments[0], memory)
        if call in ("batch_get_into", "batch_put_from"):
            names, places = arguments
            addresses = [self._memories[number][1] + offset for number, offset, _ in places]
            return getattr(self._client, call)(names, addresses, [size for _, _, size in places])
        if call == "get":
            return self._client.get(*arguments)[:_MOST_READ]
        if call in ("put", "upsert"):
            arguments = *arguments, self._pinned
        return getattr(self._client, call)(*arguments)

    def _setup(self, own: str, protocol: str, master: str) -> int:
        client = load_client()
        self._client = client.MooncakeDistributedStore()
        self._pinned = client.ReplicateConfig()
        self._pinned.with_hard_pin = True
        code: int = self._client.setup(own, "P2PHANDSHAKE", 0, _OWN_BUFFER, protocol, "", master)
        return code

    def _register(self, number: int, descriptor: int) -> int:
        mapping = mmap.mmap(descriptor, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._memories[number] = mapping, address
        code: int = self._client.register_buffer(address, len(mapping))
        return code


def main(parent: int, control: int) -> None:
    """Run the calls that the engine's process sends, until it closes its end of the control socket.

    Args:
        parent: the process id of the engine's process.
        control: the descriptor of the control socket.
    """
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl was called, so no signal will come
        return
    client, requests = _Client(), socket.socket(fileno=control)
    while descriptors := socket.recv_fds(requests, 1, 2)[1]:
        threading.Thread(target=_answer, args=(client, *descriptors), daemon=True).start()
    os._exit(0)  # during a normal exit, the client might hang or abort


def _answer(client: _Client, channel: int, memory: int | None = None) -> None:
    with socket.socket(fileno=channel) as connection:
        call, *arguments = msgspec.msgpack.decode(b"".join(iter(lambda: connection.recv(2**16), b"")))
        try:
            result = client.make(call, arguments, memory)
            answer = msgspec.msgpack.encode(result)
        except Exception as error:
            answer = RAISED + (str(error) or repr(error))[:_MOST_TEXT].encode(errors="replace")
        with suppress(OSError):  # the engine's process may have stopped waiting for the answer
            connection.sendall(answer)
    if memory is not None:
        os.close(memory)
