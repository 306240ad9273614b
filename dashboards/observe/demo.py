"""Runs a demo that serves metrics. The workload stores, loads, misses and evicts blocks in less than a minute."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dashboards.observe.gated_demo import SERVES
from dashboards.observe.prometheus import END_S, ObserveError, end
from kvoffload.cli.demo.command import local_store
from kvoffload.model.errors import RemoteError

# The conversations outgrow first the host memory and then the disk. So lookups find prompts first on the host, then on
# the disk, and finally in the remote tier.
_WORKLOAD = ["--model", "tiny", "--conversations", "12", "--turns", "8", "--first-tokens", "384"]
_WORKLOAD += ["--turn-tokens", "96", "--answer-tokens", "24", "--host-bytes", "14MiB"]
_WORKLOAD += ["--disk", ".", "--config", "disk_bytes=11MiB"]
# On slow machines, lookups must find blocks on the same tiers. So each call may take a minute, and each round of turns
# waits until all blocks are written.
_WORKLOAD += ["--config", "remote_timeout_s=60", "--config", "disk_drain_s=60"]
_SERVE_S = 600


class Demo:
    """A demo that runs in another process.

    Args:
        process: the process, with pipes for all standard streams.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._wait_for_line(SERVES)

    def result(self) -> dict[str, Any]:
        """Start the conversations, wait until they end, and return the demo's result.

        The demo continues to serve metrics.

        Raises:
            ObserveError: the demo failed.
        """
        print(file=self._process.stdin, flush=True)
        self._wait_for_line("metrics stay at")
        assert self._process.stdout is not None
        text = ""
        for line in self._process.stdout:  # read only as far as the JSON object, because the demo still runs
            text += line
            with suppress(json.JSONDecodeError):
                result: dict[str, Any] = json.loads(text)
                return result
        raise ObserveError("the demo printed no result")

    def _wait_for_line(self, words: str) -> None:
        assert self._process.stderr is not None
        printed = ""
        for line in self._process.stderr:
            printed += line
            if words in line:
                return
        raise ObserveError(f"the demo ended (exit code {self._process.wait(END_S)}):\n{printed[-2000:]}")


@contextmanager
def run_demo(address: str) -> Iterator[Demo]:
    """Start a demo, wait until it serves metrics, and end the demo when the `with` block ends.

    The conversations begin when `result` is called, so begin to scrape before that call.

    Args:
        address: the HOST:PORT at which the demo serves metrics.

    Raises:
        ObserveError: the demo does not start.
    """
    program = str(Path(__file__).with_name("gated_demo.py"))
    command = [sys.executable, "-P", program, "--json", *_WORKLOAD]
    command += ["--serve-metrics", address, "--serve-for", str(_SERVE_S)]
    named = partial(tempfile.TemporaryDirectory, prefix="kvoffload-observe-")
    # With host memory in files, the engine also looks for neighbours, and serves the metrics of the tier "node".
    with named() as folder, named(dir="/dev/shm") as memory:
        try:
            with local_store("s3") as store:
                tiers = [f"remote_url={store.url}", f"host_path={memory}"]
                process = subprocess.Popen(
                    [*command, *[word for tier in tiers for word in ("--config", tier)]],
                    cwd=folder,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                try:
                    yield Demo(process)
                finally:
                    end(process)
        except RemoteError as error:
            raise ObserveError(str(error)) from error
