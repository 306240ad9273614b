"""A fake of Mooncake's client. Tests install this file as `mooncake/store.py` on the import path of the
client's process.

The fake keeps its values and the list of calls in files on that import path. It records each call and its
process, and then behaves as the test has chosen for this call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

_encode = msgspec.msgpack.encode
# What the process sends to the engine's process in place of the client's result.
_ANSWERS: dict[str, Callable[[Any], bytes]] = {
    "a number": lambda _: _encode(7),
    "no result": lambda _: _encode(None),
    "three parts": lambda _: _encode((None, None, None)),
    "texts": lambda result: _encode([str(code) for code in result]),
    "too few": lambda _: _encode([]),
    "too many": lambda result: _encode(result * 2),
    "a flood": lambda _: _encode([0] * 2**22),
    "garbage": lambda _: b"garbage",
    "closes": lambda _: sys.exit(),  # this ends only the thread, which closes the connection
}
_LINES = 100


def _raise(error: Exception) -> None:
    raise error


def _print(lines: int) -> None:
    for number in range(lines):
        with suppress(BlockingIOError):  # C++ streams, too, drop what a full pipe does not take
            os.write(1 + number % 2, f"line {number} of the client\x1b[31m\n".encode())


def _print_and_abort() -> None:
    _print(_LINES)
    os.abort()


_ACTIONS: dict[str, Callable[[], object]] = {
    "hang": lambda: ctypes.PyDLL(
        None
    ).pause(),  # this keeps the GIL, as the real client does while it connects
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: _raise(ImportError("libibverbs.so.1: cannot open shared object file")),
    "raise text": lambda: _raise(ValueError("\x1b[31m" + "x" * 100_000)),
    "print": lambda: _print(100 * _LINES),
    "print and abort": _print_and_abort,
}

_FOLDER = Path(__file__).parent.parent
_NOT_FOUND = -704


def _arrive(call: str) -> int:
    """Record the call; then hang, crash, or return the status code that the test has chosen."""
    with (_FOLDER / "calls").open("a") as log:
        log.write(f"{os.getpid()} {call}\n")
    order = _FOLDER / "orders" / call
    what = order.read_text() if order.exists() else ""
    if what in _ACTIONS:
        _ACTIONS[what]()
    elif what in _ANSWERS:
        msgspec.msgpack.encode = _ANSWERS[what]  # type: ignore[assignment]
    return -900 if what == "refuse" else 0


def _file(name: str) -> Path:
    return _FOLDER / "values" / name.replace("/", "+")


class ReplicateConfig:
    with_hard_pin = False


class MooncakeDistributedStore:
    def setup(
        self, own: str, metadata: str, lent: int, buffer: int, protocol: str, device: str, master: str
    ) -> int:
        return _arrive("setup")

    def register_buffer(self, address: int, size: int) -> int:
        return _arrive("register_buffer")

    def is_exist(self, name: str) -> int:
        _arrive("is_exist")
        return int(_file(name).exists())

    def get(self, name: str) -> bytes:
        _arrive("get")
        return _file(name).read_bytes()

    def put(self, name: str, data: bytes, config: ReplicateConfig) -> int:
        _arrive("put")
        if not _file(name).exists():
            _file(name).write_bytes(data)
        return 0

    def upsert(self, name: str, data: bytes, config: ReplicateConfig) -> int:
        _arrive("upsert")
        _file(name).write_bytes(data)
        return 0

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        _arrive("batch_is_exist")
        return [int(_file(name).exists()) for name in names]

    def batch_get_into(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Apply the test's fault when half of each value has arrived."""
        values = [_file(name).read_bytes() if _file(name).exists() else None for name in names]
        for value, address, size in zip(values, addresses, sizes, strict=True):
            ctypes.memset(address, 0xA5, size)
            ctypes.memmove(address, value or b"", len(value or b"") // 2)
        _arrive("batch_get_into")
        for value, address in zip(values, addresses, strict=True):
            ctypes.memmove(address, value or b"", len(value or b""))
        return [_NOT_FOUND if value is None else len(value) for value in values]

    def batch_put_from(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Apply the test's fault when half of the values are stored, the last of them truncated."""
        values = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        some = len(values) // 2
        for name, value in zip(names[:some], values, strict=False):
            _file(name).write_bytes(value)
        if some:
            _file(names[some - 1]).write_bytes(values[some - 1][:-50])
        _arrive("batch_put_from")
        for name, value in zip(names, values, strict=True):
            _file(name).write_bytes(value)
        return [0] * len(values)


_arrive("import")
