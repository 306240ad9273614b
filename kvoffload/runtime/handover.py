"""Passes open files from one process of an engine to its other processes on the machine.

One process offers its files under a name that all of them know, and the others ask for them. The name is that of an
abstract socket, which ends with its process and leaves nothing in any file system. So memory without a name can be
shared too, which no limit of /dev/shm concerns. Both sides check that the other runs as the same user.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256

from kvoffload.logs import get_logger
from kvoffload.model.errors import HostMemoryError

_PAUSE_S = 0.05  # between two tries to reach a process that offers nothing yet
_LONGEST = 4096  # bytes of the text that comes with the files
_MOST_FILES = 8
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other side

log = get_logger("host")


class Offer:
    """Passes files to the processes that ask for them, on a thread of its own.

    Args:
        name: the name that they ask for.
        text: what they get with the files.
        files: descriptors, which must stay open until `close`.
        askers: how many processes will ask.

    Raises:
        OSError: another process offers files under this name.
    """

    def __init__(self, name: str, text: bytes, files: Sequence[int], askers: int) -> None:
        self._text = text
        self._files = files
        self._askers = askers
        self._is_closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(_address(name))
            self._socket.listen(askers)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="kvoffload-offer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, also if some processes have not asked yet."""
        self._is_closing = True
        with suppress(OSError):  # it is closed already, because all have asked
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self) -> None:
        left = self._askers
        with self._socket:
            try:
                while left:
                    asker, _ = self._socket.accept()
                    with asker:
                        left -= self._pass_to(asker)
            except OSError as error:
                if not self._is_closing:  # else `close` has ended `accept`
                    log.error("host_memory_not_offered", reason=str(error), ranks_without=left)

    def _pass_to(self, asker: socket.socket) -> bool:
        """Pass the files to one process; return whether it got them."""
        if not _is_same_user(asker):
            log.warning("host_memory_not_offered", reason="a process of another user asked for it")
            return False
        try:
            socket.send_fds(asker, [self._text], self._files)
        except OSError:  # it has ended
            return False
        return True


def ask(name: str, timeout_s: float) -> tuple[bytes, list[int]]:
    """Return the text and the files that another process offers, after waiting for the offer.

    Args:
        name: the offer's name.
        timeout_s: how many seconds to wait.

    Raises:
        HostMemoryError: nothing was offered in time, or by a process of another user.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        while True:
            try:
                asking.connect(_address(name))
                break
            except ConnectionRefusedError:
                if time.monotonic() >= deadline:
                    raise HostMemoryError(f"nothing was offered for {timeout_s:g} s") from None
                time.sleep(_PAUSE_S)
        if not _is_same_user(asking):
            raise HostMemoryError("a process of another user offers it")
        asking.settimeout(timeout_s)
        return _receive(asking)


def _receive(asking: socket.socket) -> tuple[bytes, list[int]]:
    try:
        text, files, flags, _ = socket.recv_fds(asking, _LONGEST, _MOST_FILES)
    except OSError as error:
        raise HostMemoryError(f"the process that offers it has ended: {error}") from error
    if not text:
        raise HostMemoryError("the process that offers it has ended")
    if flags & socket.MSG_CTRUNC:
        for descriptor in files:
            os.close(descriptor)
        raise HostMemoryError("this process may not open so many files: raise its limit (ulimit -n)")
    for descriptor in files:
        # Programs that this process starts would keep the memory. `recv_fds` ignores its argument `flags`.
        os.set_inheritable(descriptor, False)
    return text, files


def _address(name: str) -> str:
    return f"\0kvoffload-{sha256(name.encode()).hexdigest()}"


def _is_same_user(other: socket.socket) -> bool:
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
