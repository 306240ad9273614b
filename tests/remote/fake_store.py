from __future__ import annotations

from collections.abc import Sequence

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError, RemoteGone
from kvoffload.model.ids import BlockKey
from kvoffload.remote.client import MISSING, Refusals
from kvoffload.remote.values import Shard
from tests.gates import ThreadGate


class FakeStore:
    """A remote tier in memory that answers or fails as the test decides.

    Attributes:
        gate: if set, every call waits at this gate.
        calls: the calls, in order.
        registered: how often memory was registered.
    """

    def __init__(self) -> None:
        self.refusals = Refusals()
        self.refusals.fault = RemoteFault.FULL
        self.values: dict[str, bytes] = {}
        self.fails = self.is_gone = self.is_full = self.is_closed = False
        self.registered = 0
        self.gate: ThreadGate | None = None
        self.calls: list[str] = []

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        if self.gate is not None:
            self.gate.arrive()
        if self.is_gone:
            raise RemoteGone("the test says so")
        if self.fails:
            raise RemoteError("the test says so")

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        self._begin("ask")
        return [shard.name(key) in self.values for key in keys]

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        self._begin("get")
        arrived = []
        for key, buffer in zip(keys, buffers, strict=True):
            value = self.values.get(shard.name(key))
            if value is not None:
                buffer[: len(value)] = value
            arrived.append(MISSING if value is None else len(value))
        return arrived

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        self._begin("put")
        if not self.is_full:
            for key, value in zip(keys, values, strict=True):
                self.values.setdefault(shard.name(key), bytes(value))
        return [shard.name(key) in self.values for key in keys]

    def read(self, name: str) -> bytes | None:
        self._begin("read")
        return self.values.get(name)

    def create(self, name: str, data: bytes) -> None:
        self._begin("create")
        self.values.setdefault(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self._begin("replace")
        self.values[name] = data

    def register(self, buffer: memoryview) -> None:
        self.registered += 1

    def close(self) -> None:
        self.is_closed = True
