"""Mooncake Store as a remote store: a value is an object, read and written by batches without a copy in Python.

What this file must know of its client (observed with 0.3.13):
* Connecting holds the interpreter's lock, so the whole process stops: without a master for 90 s, under a master that is stopped for
  600 s. So the connection first makes sure that a master answers.
* Without a master, any call of an open connection takes 4.3 s; under a master that is stopped 30 s, under a node that is stopped 60 s.
  Other threads run meanwhile, and callers have their own time limit. A thread that waits for a stopped node takes a whole core.
* A thread that returns from a call while the interpreter ends aborts the process.
* An object is immutable: a put under an existing name does nothing and is answered as done.
* For ten seconds after a node has died, the master still reports its objects, and answers puts of them as done. A get takes 0.7 s then.
* A hard-pinned object is not evicted; the generation is one.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np

from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import MooncakeAddress
from kvoffload.remote.store import FAILED, MISSING, Refusals
from kvoffload.remote.values import Shard

_NOT_FOUND = -704
_NO_ANSWER = -800  # and below: a transfer that broke off, a call without an answer
_NO_REQUEST = bytes(32)
_OWN_BUFFER = 16 * 2**20  # of the client's, for small objects
_INSTALL = (
    "the Mooncake client cannot be loaded ({}); install kvoffload[mooncake], or on a GPU the client's wheel for its CUDA, "
    "and the package libibverbs1"
)


class MooncakeStore:
    """A connection to a Mooncake Store. It lends the store no memory.

    Args:
        address: of the master.
        timeout_s: seconds that the master may take to answer.

    Raises:
        RemoteError: the client is not installed, or no master answers.
    """

    def __init__(self, address: MooncakeAddress, timeout_s: float) -> None:
        client = load_client()
        own = own_address(address, timeout_s)
        self._refusals = Refusals()
        self._client = client.MooncakeDistributedStore()
        self._pinned = client.ReplicateConfig()
        self._pinned.with_hard_pin = True
        master = f"{address.host}:{address.port}"
        code = self._client.setup(own, "P2PHANDSHAKE", 0, _OWN_BUFFER, address.protocol, "", master)
        if code:
            raise RemoteError(f"the Mooncake master at {address} refuses the connection (code {code})")

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        codes = self._client.batch_is_exist([shard.name(key) for key in keys])
        if codes and min(codes) < 0:
            raise RemoteError(f"the Mooncake master does not answer (code {min(codes)})")
        return [code == 1 for code in codes]

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        names = [shard.name(key) for key in keys]
        codes = self._client.batch_get_into(names, _addresses(buffers), [len(buffer) for buffer in buffers])
        if all(code <= _NO_ANSWER for code in codes):
            raise RemoteError(f"Mooncake delivers nothing (code {codes[0]})")
        return [code if code >= 0 else MISSING if code == _NOT_FOUND else FAILED for code in codes]

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        names = [shard.name(key) for key in keys]
        codes = self._client.batch_put_from(names, _addresses(values), [len(value) for value in values])
        if all(code <= _NO_ANSWER for code in codes):
            raise RemoteError(f"Mooncake takes nothing (code {codes[0]})")
        refused = [code for code in codes if code]
        self._refusals.note(f"Mooncake's code {refused[0]}" if refused else None)
        return [not code for code in codes]

    def read(self, name: str) -> bytes | None:
        code = self._client.is_exist(name)
        if code == 0:
            return None
        data: bytes = self._client.get(name) if code == 1 else b""
        if not data:
            raise RemoteError(f"Mooncake does not deliver {name} (code {code})")
        return data

    def create(self, name: str, data: bytes) -> None:
        _check(self._client.put(name, data, self._pinned), name)

    def replace(self, name: str, data: bytes) -> None:
        _check(self._client.upsert(name, data, self._pinned), name)

    def register(self, buffer: memoryview) -> None:
        code = self._client.register_buffer(_addresses([buffer])[0], len(buffer))
        if code:
            raise RemoteError(f"Mooncake cannot use {len(buffer)} bytes of memory (code {code})")

    def close(self) -> None:
        self._client.close()


def load_client() -> Any:  # noqa: ANN401  # a module without types
    """Return the client's module.

    Raises:
        RemoteError: it is not installed, or a library that it needs is not.
    """
    try:
        import mooncake.store
    except ImportError as error:
        raise RemoteError(_INSTALL.format(error)) from error
    return mooncake.store


def own_address(address: MooncakeAddress, timeout_s: float) -> str:
    """Return the address from which this machine reaches the master.

    Raises:
        RemoteError: no master answers there.
    """
    try:
        with closing(socket.create_connection((address.host, address.port), timeout_s)) as connection:
            own: str = connection.getsockname()[0]
            # The kernel accepts connections for a process that is stopped. One that runs ends those that speak no protocol of its own.
            with suppress(ConnectionResetError):
                connection.sendall(_NO_REQUEST)
                connection.recv(1)
    except OSError as error:
        raise RemoteError(f"no Mooncake master answers at {address}: {error}") from error
    return own


def _addresses(buffers: Sequence[memoryview]) -> list[int]:
    return [int(np.frombuffer(buffer, np.uint8).ctypes.data) for buffer in buffers]


def _check(code: int, name: str) -> None:
    if code:
        raise RemoteError(f"Mooncake does not take {name} (code {code})")
