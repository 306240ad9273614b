"""Ends commands at random moments, and checks the files and output that they leave.

Each command runs in a separate process, and installs its signal handlers in the first line of `script`. A
random time later, it is ended in one of six ways. There must be no traceback, the exit code must be a
documented one, and every file with its final name must be complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path

from kvoffload.cli.exits import Exit

AT_ONCE = 2
_LONGEST_S = 60.0
_SMALL = "demo --model tiny --conversations 2 --turns 2 --first-tokens 200 --turn-tokens 30 --answer-tokens 4"

# The program reports on a pipe when its signal handlers are installed.
_PROGRAM = """
import os, sys
from kvoffload.cli import main, signals

def handle(ready=int(sys.argv.pop(1)), handle=signals.handle):
    handle()
    os.write(ready, b"x")
    os.close(ready)

signals.handle = handle
sys.exit(main.main())
"""
_UGLY = re.compile(
    "Traceback|Exception ignored|never retrieved|never awaited|was destroyed|Fatal Python error"
)
_SIGNALS = {"ctrl-c": signal.SIGINT, "ctrl-c twice": signal.SIGINT, "sigterm": signal.SIGTERM}
# the ways to end a command, and the exit codes that each may cause
WAYS: dict[str, set[int]] = {
    "ctrl-c": {Exit.INTERRUPTED},
    "ctrl-c twice": {Exit.INTERRUPTED},
    "sigterm": {Exit.TERMINATED},
    "closed output": {Exit.OUTPUT},
    "full disk": {Exit.OUTPUT},
    "closed terminal": {Exit.HUNG_UP, Exit.OUTPUT},
}


def _is_page(path: Path) -> bool:
    return path.read_text(encoding="utf-8").rstrip().endswith("</html>")


def _is_json(path: Path) -> bool:
    json.loads(path.read_text(encoding="utf-8"))
    return True


@dataclass(frozen=True, slots=True)
class Command:
    """A command line. `{folder}` in it stands for a new folder, and `{journal}` for a journal.

    Args:
        line: the arguments.
        outputs: the files that the command writes to the folder, each with a check that it is complete.
    """

    line: str
    outputs: dict[str, Callable[[Path], bool]] = field(default_factory=dict)


COMMANDS = {
    "demo": Command(_SMALL),
    "demo-json": Command(f"{_SMALL} --json"),
    "report": Command("report {journal} -o {folder}/page.html", {"page.html": _is_page}),
    "timeline": Command("timeline {journal} -o {folder}/trace.json", {"trace.json": _is_json}),
    "timeline-stdout": Command("timeline {journal} -o -"),
    "doctor": Command("doctor --verbose --config host_bytes=1GiB"),
    "dashboards": Command("dashboards export {folder}/new"),
    "completion": Command("completion bash"),
    "sglang-args": Command("sglang-args --config disk_path={folder}"),
    "vllm-args": Command("vllm-args --host-bytes 1GiB"),
    "help": Command("--help"),
}


@dataclass(frozen=True, slots=True)
class Kill:
    """How to kill a command. `share` is the moment, as a share of the command's usual duration."""

    command: str
    way: str
    share: float
    pause_s: float
    disk_bytes: int

    def __str__(self) -> str:
        return f"{self.command} by {self.way} at {self.share:.3f} of its time"


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    errors: str
    seconds: float
    was_running: bool


def draw(seed: int, count: int) -> list[Kill]:
    """Return random kills, spread evenly over the commands."""
    chance = random.Random(seed)
    names = list(COMMANDS)
    return [
        Kill(
            names[number % len(names)],
            chance.choice(list(WAYS)),
            chance.random(),
            chance.uniform(0, 0.05),
            chance.choice([0, 100, 2000, 20000]),
        )
        for number in range(count)
    ]


class Killer:
    def __init__(self, folder: Path) -> None:
        self.hits = 0
        """how many kills found the process still running"""
        self._folder = folder
        self._journal = folder / "journal"
        made = self._run(f"{_SMALL} --config journal_path={self._journal}", folder, None)
        assert made.code == Exit.OK, made
        self._usual_s = {name: self._undisturbed(name) for name in COMMANDS}

    def problems(self, kills: list[Kill]) -> Iterator[str]:
        """Kill several commands in parallel; yield all problems."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for kill, found in zip(kills, pool.map(self._problems_of, kills), strict=True):
                yield from (f"{kill}: {problem}" for problem in found)

    def _undisturbed(self, name: str) -> float:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            done = self._run(COMMANDS[name].line, Path(folder), None)
            assert done.code in (Exit.OK, Exit.USAGE), (name, done)
            assert all(whole(Path(folder) / file) for file, whole in COMMANDS[name].outputs.items()), name
            return done.seconds

    def _problems_of(self, kill: Kill) -> list[str]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            ended = self._run(COMMANDS[kill.command].line, Path(folder), kill)
            problems = [f"it printed {found[0]!r}: {ended.errors}" for found in _UGLY.finditer(ended.errors)]
            if ended.code not in {Exit.OK, *WAYS[kill.way]}:
                problems.append(f"exit code {ended.code}: {ended.errors}")
            self.hits += ended.was_running
            return problems + list(self._half_written(kill.command, Path(folder)))

    def _half_written(self, name: str, folder: Path) -> Iterator[str]:
        for file, whole in COMMANDS[name].outputs.items():
            path = folder / file
            try:
                if path.exists() and not whole(path):
                    yield f"{file} is half written"
            except ValueError as error:
                yield f"{file} is half written: {error}"
        for path in (folder / "new").rglob("*"):
            is_final = path.is_file() and path.suffix != ".partial"
            if is_final and not path.read_bytes().endswith((b"\n", b"}")):
                yield f"{path.name} is half written"

    def _run(self, line: str, folder: Path, kill: Kill | None) -> Outcome:
        argv = line.format(folder=folder, journal=self._journal).split()
        way = kill.way if kill is not None else ""
        ready, is_ready = os.pipe()
        with _standard_output(way, folder) as (reader, output):
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(is_ready), *argv],
                stdin=output if way == "closed terminal" else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                pass_fds=[is_ready],
                start_new_session=True,
                preexec_fn=partial(_prepare, kill),
            )
            try:
                os.close(is_ready)
                os.close(output)
                os.read(ready, 1)
                begun = time.monotonic()
                was_running = kill is None or self._end(process, reader, kill)
                text = process.communicate(timeout=_LONGEST_S)[1]
            finally:
                process.kill()
                os.close(ready)
        code = process.returncode
        seconds = time.monotonic() - begun
        return Outcome(128 - code if code < 0 else code, text.decode(errors="replace"), seconds, was_running)

    def _end(self, process: subprocess.Popen[bytes], reader: FileIO | None, kill: Kill) -> bool:
        """Wait, then end the process. Return whether the process was still running."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(kill.share * self._usual_s[kill.command])
        was_running = process.poll() is None
        if reader is not None:
            reader.close()
        elif kill.way in _SIGNALS:
            process.send_signal(_SIGNALS[kill.way])
        if kill.way == "ctrl-c twice":
            with suppress(subprocess.TimeoutExpired):
                process.wait(kill.pause_s)
            process.send_signal(signal.SIGINT)
        return was_running


@contextmanager
def _standard_output(way: str, folder: Path) -> Iterator[tuple[FileIO | None, int]]:
    """Yield the read end and the write end of the command's output. The caller closes the write end.

    The read end is None unless closing it is the way to end the process.
    """
    if way in ("closed output", "closed terminal"):
        descriptor, output = os.pipe() if way == "closed output" else pty.openpty()
        # `FileIO` closes its descriptor only once. Closing it twice could close another file with the same number.
        with FileIO(descriptor) as reader:
            yield reader, output
        return
    name = Path("/dev/full") if way == "full disk" else folder / "stdout"
    yield None, os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)


def _prepare(kill: Kill | None) -> None:
    """In the new process, set the terminal and the limit on file sizes."""
    if kill is not None and kill.way == "closed terminal":
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    if kill is not None and kill.way == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill.disk_bytes, kill.disk_bytes))
