"""Runs a real Prometheus on the loopback interface, with its files in a temporary folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.remote.local import free_port

SCRAPE_MS = 200
"""The time between two scrapes in milliseconds. It is short, so that even a demo of a few seconds is scraped often."""
_RULES = Path(__file__).resolve().parent.parent / "rules"
_POLL_S = 0.1
END_S = 60.0
"""How many seconds a child process may take to end after SIGTERM."""


class ObserveError(Exception):
    """Raised if a needed program is missing or fails."""


@dataclass(frozen=True, slots=True)
class Series:
    """The labels and values of a series in a query's result, the oldest value first."""

    labels: dict[str, str]
    values: tuple[float, ...]


def wait_for(what: str, is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll a condition until it is true.

    Args:
        what: a description of the condition, for the error.
        is_so: returns whether the condition is true.
        seconds: the time limit.

    Raises:
        ObserveError: the condition was not true within the time limit.
    """
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise ObserveError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(_POLL_S)


class Prometheus:
    """A running Prometheus server.

    Args:
        url: the server's URL, without `/api`.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str, at: float | None = None) -> list[Series]:
        """Evaluate an expression at the time `at`, in unix seconds; by default now. Each series has one value.

        Raises:
            ObserveError: Prometheus refuses the expression.
        """
        result = self.get("query", query=expr, time=at or time.time())["result"]
        return [Series(one["metric"], (float(one["value"][1]),)) for one in result]

    def query_range(self, expr: str, start: float, end: float) -> list[Series]:
        """Evaluate an expression at all times from `start` to `end`, in unix seconds, in steps of `SCRAPE_MS`.

        Raises:
            ObserveError: Prometheus refuses the expression.
        """
        result = self.get("query_range", query=expr, start=start, end=end, step=SCRAPE_MS / 1000)["result"]
        return [Series(one["metric"], tuple(float(value) for _, value in one["values"])) for one in result]

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their health, as the HTTP API describes them."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def get(self, path: str, **parameters: object) -> Any:  # noqa: ANN401  # as the API answers
        """Send a request to the HTTP API, and return the `data` of the server's answer.

        Raises:
            ObserveError: the server's answer is an error.
        """
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                reason = json.load(error).get("error", error.reason)
            raise ObserveError(f"{reason} ({parameters.get('query', path)})") from error


@contextmanager
def run_prometheus(targets: Sequence[str], every_ms: int = SCRAPE_MS) -> Iterator[Prometheus]:
    """Run a Prometheus until the `with` block ends. It scrapes engines and evaluates kvoffload's rules.

    Args:
        targets: the engines' addresses, as HOST:PORT.
        every_ms: the time between two scrapes, and between two evaluations of the rules, in milliseconds.

    Raises:
        ObserveError: Prometheus is not installed or does not start.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise ObserveError("there is no program `prometheus`: `make tools` installs it")
    with tempfile.TemporaryDirectory(prefix="kvoffload-observe-") as folder:
        home, port = Path(folder), free_port()
        (home / "prometheus.yml").write_text(json.dumps(_config(targets, every_ms)))  # JSON is valid YAML
        command = [
            *(program, f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        server = Prometheus(f"http://127.0.0.1:{port}")
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def is_ready() -> bool:
            if process.poll() is not None:
                raise ObserveError(f"prometheus did not start:\n{(home / 'log').read_text()[-2000:]}")
            with suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5):
                return True
            return False

        try:
            wait_for("prometheus to start", is_ready)
            yield server
        finally:
            end(process)


def end(process: subprocess.Popen[Any], timeout_s: float = END_S) -> None:
    """End a child process with SIGTERM, or with SIGKILL after the time limit.

    Raises:
        ObserveError: SIGTERM did not end the child in time.
    """
    process.terminate()
    try:
        process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ObserveError(f"SIGTERM did not end process {process.pid} in {timeout_s:g} s") from None


def _config(targets: Sequence[str], every_ms: int) -> dict[str, object]:
    every = f"{every_ms}ms"
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(_RULES / "recording.yml"), str(_RULES / "alerts.yml")],
        "scrape_configs": [{"job_name": "observed", "static_configs": [{"targets": list(targets)}]}],
    }
