"""Runs each part of the check in a process of its own, with a time limit: a part may hang or crash and loses only its own rest.

    python -m kvoffload.gpu_check.apart PART OPTIONS FILE

The part's function takes `Options` and the part's arguments, and yields lines. They are appended to FILE, where the
parent finds them whatever happens to the part later.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from kvoffload.gpu_check.lines import Line, ask_each

_POLL_S = 0.05
_LOG_BYTES = 300  # shown of what a part has printed before it failed
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True)
class Options:
    """What each part is given.

    Args:
        device: the GPU, as torch names it.
        mib: MiB of one large copy, and half of the memory on each side.
        repeats: of each measurement.
        host_gib: host memory of an engine.
    """

    device: str
    mib: int
    repeats: int
    host_gib: int

    @property
    def size(self) -> int:
        """Bytes of one large copy."""
        return self.mib << 20


@dataclass(frozen=True, slots=True)
class Part:
    """What runs in one process.

    Args:
        what: its subject, for the line that says how it failed.
        where: MODULE:FUNCTION.
        limit_s: after which it is killed.
        arguments: of the function, behind the options; strings and numbers.
        is_check: whether nothing should be offloaded where it fails.
    """

    what: str
    where: str
    limit_s: float
    arguments: tuple[str | int, ...] = ()
    is_check: bool = False


def lines_of(part: Part, options: Options, log: Path) -> Iterator[Line]:
    """Run a part and yield its lines as it finds them, then one that says how it failed, if it did.

    Args:
        part: which.
        options: for it.
        log: what it prints is appended here.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as printed:
        found = Path(folder, "lines")
        found.touch()
        began = printed.tell()
        words = [json.dumps(asdict(part)), json.dumps(asdict(options)), str(found)]
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *words],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            with found.open("rb") as file:
                yield from _followed(process, file, time.monotonic() + part.limit_s)
            if problem := _problem(process.poll(), part.limit_s, log, began):
                yield Line(part.what, words=problem, is_met=False, is_check=part.is_check)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started
            process.wait()


def _followed(process: subprocess.Popen[bytes], file: BinaryIO, deadline: float) -> Iterator[Line]:
    """Yield lines until the process has ended or time is up."""
    has_ended = False
    while not has_ended and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        has_ended = process.poll() is not None  # asked first: afterwards nothing more is written
        while (text := file.readline()).endswith(b"\n"):
            yield Line(**json.loads(text))
        file.seek(-len(text), os.SEEK_CUR)


def _problem(code: int | None, limit_s: float, log: Path, began: int) -> str:
    """Return how a part failed, with the end of what it printed; nothing if it did not."""
    if code == 0:
        return ""
    if code is None:
        how = f"has not ended after {limit_s:g} s, and was killed"
    elif code < 0:
        how = f"ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with {code}"
    said = log.read_bytes()[began:].decode(errors="replace").strip()[-_LOG_BYTES:]
    return f"{how}: {' | '.join(said.splitlines())}" if said else how


def main() -> None:
    """Run one part in this process."""
    part, options, target = Part(**json.loads(sys.argv[1])), Options(**json.loads(sys.argv[2])), sys.argv[3]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with open(target, "a") as file:
        for line in ask_each({part.what: partial(_found, part, options)}, is_check=part.is_check):
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()


def _found(part: Part, options: Options) -> Iterator[Line]:
    module, _, name = part.where.partition(":")
    yield from getattr(import_module(module), name)(options, *part.arguments)


if __name__ == "__main__":
    main()
