"""A running demo that serves its metrics: a workload that stores, loads, misses and evicts in less than a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dashboards.observe.gated_demo import SERVES
from dashboards.observe.prometheus import END_S, ObserveError, end
from kvoffload.model.errors import RemoteError
from kvoffload.remote.local import LocalBucket

# The conversations outgrow host memory after some turns, and then the disk: prompts are found again on the host at first, later on
# the disk, and at last in the store.
_WORKLOAD = ["--model", "tiny", "--conversations", "12", "--turns", "8", "--first-tokens", "384"]
_WORKLOAD += ["--turn-tokens", "96", "--answer-tokens", "24", "--host-bytes", "14MiB"]
_WORKLOAD += ["--disk", ".", "--config", "disk_bytes=11MiB"]
# A store or a disk that is slow for a while must not change what is found where: each call may take a minute, and each turn of
# all conversations ends when everything is written.
_WORKLOAD += ["--config", "remote_timeout_s=60", "--config", "drain_s=60"]
_SERVE_S = 600


@dataclass(frozen=True, slots=True)
class Demo:
    """A running demo.

    Args:
        process: the command.
        errors: its standard error, of which the first lines have been read.
    """

    process: subprocess.Popen[str]
    errors: IO[str]

    def result(self) -> dict[str, Any]:
        """Let the conversations begin, wait for their end and return their result. The demo goes on serving.

        Raises:
            ObserveError: it failed.
        """
        print(file=self.process.stdin, flush=True)
        for line in self.errors:
            if "metrics stay at" in line:
                break
        else:
            raise ObserveError(
                f"the demo ended with exit code {self.process.wait(END_S)} and serves no longer"
            )
        assert self.process.stdout is not None
        result: dict[str, Any] = json.loads(_first_object(self.process.stdout))
        return result


@contextmanager
def run_demo(address: str) -> Iterator[Demo]:
    """Start the demo and wait until it serves metrics at HOST:PORT; end it with the `with` block.

    Its conversations begin with `result`: to see all of them, scrape the address before.

    Raises:
        ObserveError: it does not start.
    """
    program = str(Path(__file__).with_name("gated_demo.py"))
    command = [sys.executable, "-P", program, "--json", *_WORKLOAD]
    command += ["--serve-metrics", address, "--serve-for", str(_SERVE_S)]
    with (
        tempfile.TemporaryDirectory(prefix="kvoffload-observe-") as folder,
        tempfile.TemporaryDirectory(prefix="kvoffload-store-") as store_folder,
        closing(_store(Path(store_folder))) as store,
    ):
        command += ["--config", f"remote_url={store.url}"]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **store.environment},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            _wait_until_served(process, process.stderr)
            yield Demo(process, process.stderr)
        finally:
            end(process)


def _store(folder: Path) -> LocalBucket:
    try:
        return LocalBucket(folder)
    except RemoteError as error:
        raise ObserveError(str(error)) from error


def _wait_until_served(process: subprocess.Popen[str], errors: IO[str]) -> None:
    said = []
    for line in errors:
        said.append(line)
        if SERVES in line:
            return
    raise ObserveError(f"the demo did not start (exit code {process.wait(END_S)}):\n{''.join(said)[-2000:]}")


def _first_object(lines: IO[str]) -> str:
    """Read up to the end of the first JSON object. The command goes on, so the file has no end yet."""
    text = ""
    for line in lines:
        text += line
        if line.startswith("}") or (line.startswith("{") and line.rstrip().endswith("}")):
            return text
    raise ObserveError("the demo printed no result")
