"""A gate that holds the copies of other processes until the test releases them.

Workers also report to the gate when they close their connectors.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

GATE = "KVOFFLOAD_TEST_GATE"
"""The environment variable with the path of the gate's socket."""
COPY, CLOSING, CLOSED, CLOSED_EARLY = b"copy", b"closing", b"closed", b"closed early"
GO_ON, DONE = b"g", b"d"
_PATIENCE_S = 120.0
_WHO = struct.Struct("3i")  # process id, user id and group id


def knock(reason: bytes) -> socket.socket:
    """Send a message to the gate that this process's environment names. The gate answers only messages about
    copies.
    """
    gate = socket.socket(socket.AF_UNIX)
    gate.connect(os.environ[GATE])
    gate.sendall(reason)
    return gate


@dataclass(frozen=True)
class HeldCopy:
    """A copy that waits at the gate before it begins."""

    process: int
    _connection: socket.socket

    def release(self) -> None:
        self._connection.sendall(GO_ON)

    def came_to_its_end(self) -> bool:
        """Wait until the copy has ended or its process is gone; return whether the copy ended."""
        with self._connection:
            return self._connection.recv(1) == DONE


class CopyGate:
    """Holds copies of other processes before they begin, and receives their workers' reports about closing
    connectors.
    """

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._held: Queue[HeldCopy] = Queue()
        self._closings: Queue[tuple[bytes, int]] = Queue()
        self._is_open = True
        threading.Thread(target=self._answer, daemon=True, name="gate").start()

    def hold(self) -> None:
        self._is_open = False

    def next_held(self) -> HeldCopy:
        return self._held.get(timeout=_PATIENCE_S)

    def next_closing(self) -> tuple[bytes, int]:
        """Wait for a worker's next report about closing; return the message and the worker's process id."""
        return self._closings.get(timeout=_PATIENCE_S)

    def open(self) -> None:
        """Let all later copies pass, and release the held copies that no test has taken."""
        self._is_open = True
        while not self._held.empty():
            self._held.get().release()

    def forget(self) -> None:
        while not self._closings.empty():
            self._closings.get()

    def close(self) -> None:
        self.open()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size)
            process, reason = _WHO.unpack(about)[0], connection.recv(64)
            connection.settimeout(_PATIENCE_S)
            if reason != COPY:
                self._closings.put((reason, process))
                connection.close()
                continue
            held = HeldCopy(process, connection)
            if self._is_open:
                held.release()
            else:
                self._held.put(held)
