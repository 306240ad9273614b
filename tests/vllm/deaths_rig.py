"""Controls a process that passes requests to engines in other processes, and holds the copies of these
engines.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.copy_gate import GATE, CopyGate
from tests.vllm.stock import engines

_PATIENCE_S = 120.0
_ROOT = Path(__file__).parents[2]


class Front(engines.Server):
    """Controls the process that receives requests. Its engines' processes are its children."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, log: Path) -> None:
        super().__init__(process, 0, log)
        self._words = line.makefile("rw")

    def say(self, do: str, **words: Any) -> None:
        self._words.write(json.dumps({"do": do, **words}) + "\n")
        self._words.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for the answer to the oldest command that was not answered yet."""
        answer = dict(json.loads(self._words.readline()))
        assert "error" not in answer, (answer, self.log.read_text()[-8000:])
        return answer

    def do(self, do: str, **words: Any) -> dict[str, Any]:
        self.say(do, **words)
        return self.hear()


@contextmanager
def fronting(checkpoint: Path, folder: Path) -> Iterator[tuple[Front, CopyGate]]:
    """Start the process that receives requests, without an engine, and the gate for its engines' copies.

    Both keep their files in `folder`.
    """
    gate = CopyGate(folder / "gate")
    ours, theirs = socket.socketpair()
    ours.settimeout(_PATIENCE_S)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_ROOT)]))
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": path,
        "TMPDIR": str(folder),
        GATE: str(folder / "gate"),
    }
    words = [str(theirs.fileno()), str(checkpoint), str(folder)]
    with (folder / "log").open("wb") as log, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.mortal_engine", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=environment,
        )
    made = Front(process, ours, folder / "log")
    try:
        yield made, gate
    finally:
        gate.close()
        ours.close()
        made.stop()
