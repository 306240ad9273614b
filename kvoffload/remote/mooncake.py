"""Mooncake Store as a remote tier. Each value is an object. Python copies no values: Mooncake's client moves them.

For each connection, Mooncake's client runs in a child process (`mooncake_child.py`), so that the engine is not
affected if the client hangs, crashes or aborts. Each call has a time limit. If a call reaches the limit, the child is
killed, which ends the connection. Values are in memory that both processes map.

The client reads what other machines send, so the child is not trusted: if its answer has another type or number of
results than the call allows, or too many bytes, the child is killed, too. What the child prints stays out of the
engine's output; the last line is quoted if the child ends or cannot connect.

This file relies on, or works around, this behaviour of the client (observed with version 0.3.13):
* Connecting holds the GIL: for 2 s if a proxy closes each connection, 90 s without a master, 600 s if the master is
  suspended. So the engine's process first checks that a master answers, and otherwise starts no child.
* A call on an open connection takes 4.3 s without a master, 30 s if the master is suspended, and 60 s if a node is
  suspended. A thread that waits for a suspended node uses a whole core.
* If a call returns on a thread while the interpreter exits, the process aborts.
* Objects are immutable. A put under an existing name does nothing and is reported as successful.
* For ten seconds after a node has died, the master still lists the node's objects, and reports puts of these objects as
  successful. A get of such an object takes 0.7 s.
* Hard-pinned objects are not evicted, so the generation is stored as a hard-pinned object.
* A master that restores a snapshot has the list of objects of that time, and the nodes' memory as it is now. A
  replacement of equal length is written to the same memory, so it is still there. A replacement of another length is
  lost, and the replaced object is back. So all generations have the same length (`values.py`).
* A put that returns 0 may evict the object of an earlier put, and asking for an object protects it from eviction for
  the length of a lease, by default 10 s. So a put proves nothing, and each question takes space from new objects.
* The client writes about six lines per attempt to connect to standard error, and attempts it 20 times. Its setting
  MC_LOG_LEVEL=ERROR leaves one line per attempt.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from io import FileIO
from typing import Any

import msgspec

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError, RemoteGone, printable
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import MooncakeAddress
from kvoffload.remote.client import FAILED, MISSING, Refusals, SharedMemory
from kvoffload.remote.mooncake_child import RAISED
from kvoffload.remote.values import Shard

CONNECT_S = 10.0
"""How many seconds the child process may take to start and connect."""
_END_S = 1.0  # how many seconds to wait until a killed process has exited
_LEAST_S = 1e-3
_NOT_FOUND = -704
_NO_ANSWER = -800  # codes up to -800 mean that the transfer broke off or that the call got no answer
_NO_SPACE = -200
_UNREACHABLE = RemoteFault.UNREACHABLE
_NO_REQUEST = bytes(32)
_MOST_TEXT = 200  # how many characters of the client's text a message may contain
_MOST_ANSWER = 2**20  # the size limit of an answer in bytes: the results for 100,000 keys
_PIPE_BYTES = 2**16
_CODES = list[int]
_RESULTS: dict[str, Any] = {
    "batch_is_exist": _CODES,
    "batch_get_into": _CODES,
    "batch_put_from": _CODES,
    "get": bytes,
}
"""The types of results; by default a result is an `int`."""
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kvoffload.remote.mooncake_child import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class MooncakeStore:
    """A connection to a Mooncake Store.

    The connection contributes no memory to Mooncake, and ends with the thread that opened it.

    Args:
        address: the master's address.
        timeout_s: how many seconds the master may take for its first answer, and for each call.

    Raises:
        RemoteError: the client is not installed, or no master answers.
    """

    def __init__(self, address: MooncakeAddress, timeout_s: float) -> None:
        own = own_address(address, timeout_s)
        self.refusals = Refusals()
        self._timeout_s = timeout_s
        self._reason: str | None = None  # why the child was killed, or None
        self._process, self._control, self._output = _start(timeout_s)
        self._end = weakref.finalize(self, _end, self._process, self._control, self._output)
        master = f"{address.host}:{address.port}"
        try:
            code = self._call("setup", own, address.protocol, master, limit_s=CONNECT_S)
            if code:
                reason = f"the Mooncake master at {address} refuses the connection (code {code})"
                raise RemoteError(f"{reason}{self._last_line()}")
        except RemoteError:
            self.close()
            raise

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        codes = self._codes("batch_is_exist", shard, keys)
        if codes and min(codes) < 0:
            raise RemoteError(f"the Mooncake master does not answer (code {min(codes)})", _UNREACHABLE)
        return [code == 1 for code in codes]

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        codes = self._codes("batch_get_into", shard, keys, list(map(_place, buffers)))
        if all(code <= _NO_ANSWER for code in codes):
            raise RemoteError(f"Mooncake delivers nothing (code {codes[0]})", _UNREACHABLE)
        return [code if code >= 0 else MISSING if code == _NOT_FOUND else FAILED for code in codes]

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        codes = self._codes("batch_put_from", shard, keys, list(map(_place, values)))
        if all(code <= _NO_ANSWER for code in codes):
            raise RemoteError(f"Mooncake takes nothing (code {codes[0]})", _UNREACHABLE)
        refused = [code for code in codes if code]
        fault = RemoteFault.FULL if refused[:1] == [_NO_SPACE] else RemoteFault.OTHER
        self.refusals.note(f"Mooncake's code {refused[0]}" if refused else None, fault)
        return [not code for code in codes]

    def read(self, name: str) -> bytes | None:
        code = self._call("is_exist", name)
        if code == 0:
            return None
        data: bytes = self._call("get", name) if code == 1 else b""
        if not data:
            raise RemoteError(f"Mooncake does not deliver {name} (code {code})")
        return data

    def create(self, name: str, data: bytes) -> None:
        _check(self._call("put", name, data), name)

    def replace(self, name: str, data: bytes) -> None:
        _check(self._call("upsert", name, data), name)

    def register(self, buffer: memoryview) -> None:
        memory = buffer.obj
        assert isinstance(memory, SharedMemory), "the child must be able to map it"
        code = self._call("register_buffer", memory.descriptor, memory=memory)
        if code:
            raise RemoteError(f"Mooncake cannot use {len(memory)} bytes of memory (code {code})")

    def close(self) -> None:
        self._end()

    def _codes(self, call: str, shard: Shard, keys: Sequence[BlockKey], *arguments: object) -> list[int]:
        """Return the result of a call for several keys: a code for each key."""
        codes: list[int] = self._call(call, [shard.name(key) for key in keys], *arguments)
        if len(codes) != len(keys):
            raise self._gone(f"Mooncake's client returned {len(codes)} results for {len(keys)} keys")
        return codes

    def _call(
        self, call: str, *arguments: object, memory: SharedMemory | None = None, limit_s: float | None = None
    ) -> Any:  # noqa: ANN401  # the type depends on the call
        """Let the child call Mooncake's client, and return the result. Each call uses a socket pair of its own.

        Raises:
            RemoteError: the call raised an error in the child.
            RemoteGone: the child exited, or was killed because it did not answer in time or not as the call allows.
        """
        limit_s = limit_s or self._timeout_s
        self._output.read(_PIPE_BYTES)  # make room for the lines of this call
        until = time.monotonic() + limit_s
        ours, theirs = socket.socketpair()
        try:
            with ours:
                with theirs:
                    passed = [theirs.fileno()] if memory is None else [theirs.fileno(), memory.descriptor]
                    socket.send_fds(self._control, [b"."], passed)
                ours.settimeout(limit_s)
                ours.sendall(msgspec.msgpack.encode((call, *arguments)))
                ours.shutdown(socket.SHUT_WR)
                data = _received(ours, until)
        except TimeoutError:
            raise self._gone(f"Mooncake has not answered for {limit_s:g} s", RemoteFault.TIMEOUT) from None
        except OSError:
            data = b""
        if not data:
            raise self._gone(f"the process of Mooncake's client {self._how_ended()}{self._last_line()}")
        if data[:1] == RAISED:
            raise RemoteError(printable(data[1:].decode(errors="replace")[:_MOST_TEXT]))
        try:
            return msgspec.msgpack.decode(data, type=_RESULTS.get(call, int))
        except msgspec.DecodeError:
            reason = "the process of Mooncake's client sent something other than an answer"
            raise self._gone(reason) from None

    def _how_ended(self) -> str:
        """Return what a child did that closed a connection without an answer."""
        with suppress(subprocess.TimeoutExpired):
            return f"has ended (exit code {self._process.wait(_END_S)})"
        return "closed a connection without an answer"

    def _last_line(self) -> str:
        """Return the last line that the child has printed since the call began, after ": "; "" if it printed none."""
        lines = (self._output.read(_PIPE_BYTES) or b"").decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f": {printable(last[:_MOST_TEXT])}" if last else ""

    def _gone(self, reason: str, fault: RemoteFault = RemoteFault.OTHER) -> RemoteGone:
        """Kill the child and return the error to raise. Other threads' calls then fail with the same reason."""
        self._reason = self._reason or reason
        _kill(self._process)
        return RemoteGone(self._reason, fault)


def _start(timeout_s: float) -> tuple[subprocess.Popen[bytes], socket.socket, FileIO]:
    """Start a child process.

    Ctrl-C in a terminal does not signal the child.

    Returns:
        The process, the control socket, which sends calls to the child, and a pipe with the child's output. The pipe
        blocks neither end: output that does not fit is lost.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, printed = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    control.settimeout(timeout_s)
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(os.getpid()), str(theirs.fileno())]
    # Hide the GPUs, because the child copies only host memory and must not use GPU memory.
    environment = {"MC_LOG_LEVEL": "ERROR", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with theirs, open(printed, "wb", buffering=0) as pipe:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            control.close()
            os.close(output)
            raise
    return process, control, FileIO(output)


def _end(process: subprocess.Popen[bytes], control: socket.socket, output: FileIO) -> None:
    _kill(process)
    control.close()
    output.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _received(connection: socket.socket, until: float) -> bytes:
    """Return all bytes received until the other end closes the connection, or a few more than `_MOST_ANSWER`."""
    parts = list[bytes]()
    size = 0
    while size <= _MOST_ANSWER and (part := connection.recv(2**16)):
        parts.append(part)
        size += len(part)
        connection.settimeout(max(until - time.monotonic(), _LEAST_S))
    return b"".join(parts)


def own_address(address: MooncakeAddress, timeout_s: float) -> str:
    """Return the IP address from which this machine connects to the master.

    Raises:
        RemoteError: no master answers.
    """
    try:
        with closing(socket.create_connection((address.host, address.port), timeout_s)) as connection:
            own: str = connection.getsockname()[0]
            # The kernel accepts connections even if the master is suspended. A running master closes a connection on
            # which it gets an unknown request, so send one and wait for the end of the connection.
            with suppress(ConnectionResetError):
                connection.sendall(_NO_REQUEST)
                connection.recv(1)
    except OSError as error:
        raise RemoteError(f"no Mooncake master answers at {address}: {error}", _UNREACHABLE) from error
    return own


def _place(buffer: memoryview) -> tuple[int, int, int]:
    """Return the descriptor of the shared memory that contains a buffer, and the buffer's offset and size in bytes."""
    memory = buffer.obj
    assert isinstance(memory, SharedMemory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return memory.descriptor, address - memory.address, len(buffer)


def _check(code: int, name: str) -> None:
    if code:
        raise RemoteError(f"Mooncake does not take {name} (code {code})")
