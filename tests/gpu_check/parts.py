"""Parts for testing `gpu-check`: one for each way in which a part can end, and the shipped parts with small
sizes.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator

from kvoffload.gpu_check import latencies
from kvoffload.gpu_check.parts import Line, NotHere, Options

GPU = "a device for tests"


def device(options: Options) -> Iterator[Line]:
    yield Line("GPU", words=GPU)


def hangs(options: Options, lines: int) -> Iterator[Line]:
    for number in range(lines):
        yield Line(f"line {number}", words=str(os.getpid()))
    signal.pause()


def crashes(options: Options) -> Iterator[Line]:
    yield Line("before", words="found")
    print("a last word", flush=True)  # noqa: T201
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(options: Options) -> Iterator[Line]:
    yield Line("before", words="found")
    os._exit(7)


def raises(options: Options) -> Iterator[Line]:
    yield Line("before", words="found")
    raise ValueError("no such thing:\nnone")


def is_not_here(options: Options) -> Iterator[Line]:
    raise NotHere("there is nothing")
    yield


def small(options: Options, where: str, *arguments: int) -> Iterator[Line]:
    latencies._SECONDS = 0.02
    module, _, name = where.partition(":")
    yield from getattr(importlib.import_module(module), name)(options, *arguments)
