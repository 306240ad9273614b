"""Scrapes a server periodically on a separate thread, so that keys work while an answer takes long."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvoffload.cli.exits import CommandError
from kvoffload.cli.top.reading import History, PageError, Reading, parse_page

_PATH = "/metrics"
_LARGEST_PAGE = 64 << 20
_ACCEPT = "text/plain; version=0.0.4"

Answer = dict[str, Reading] | str
"""Readings by engine, or the problem in words."""


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a server.

    Args:
        url: of its page.
        engines: by the engine's name, which is empty where the server does not name it.
        problem: why the last scrape failed; empty if it did not.
    """

    url: str
    engines: Mapping[str, History] = field(default_factory=dict)
    problem: str = ""

    def after(self, answer: Answer) -> State:
        """Return the state after one more scrape. After a failure, the last numbers stay."""
        if isinstance(answer, str):
            return State(self.url, self.engines, answer)
        engines = {
            name: self.engines[name].after(reading) if name in self.engines else History((reading,))
            for name, reading in answer.items()
        }
        return State(self.url, engines)


def page_url(text: str) -> str:
    """Return the URL of a page of metrics from a URL, HOST:PORT, or a PORT of this machine.

    Raises:
        CommandError: it is none of them.
    """
    if text.isascii() and text.isdigit():
        text = f"127.0.0.1:{text}"
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise CommandError(
            f"{text!r} is not the URL of a page of metrics, such as http://127.0.0.1:9464/metrics, nor HOST:PORT or PORT"
        )
    return urllib.parse.urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else url


def scrape(url: str, timeout_s: float) -> Answer:
    """Return the readings, or the problem in words."""
    request = urllib.request.Request(url, headers={"Accept": _ACCEPT})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read(_LARGEST_PAGE).decode("utf-8", "replace")
        return parse_page(text, time.monotonic())
    except urllib.error.HTTPError as error:
        return f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"not reachable: {getattr(error.reason, 'strerror', None) or error.reason}"
    except PageError as error:
        return str(error)
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
    ) as error:  # it died during its answer, hangs, or redirects to no URL
        return f"not reachable: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"


class Scraper:
    """Scrapes until it is closed.

    Args:
        url: of the page.
        interval_s: from the end of one scrape to the start of the next.
        on_answer: called on the scraping thread after each scrape.
    """

    def __init__(self, url: str, interval_s: float, on_answer: Callable[[], object]) -> None:
        self.state = State(url)
        self._interval_s = interval_s
        self._on_answer = on_answer
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="kvoffload-top", daemon=True).start()

    def close(self) -> None:
        """Stop scraping. A pending answer is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.state = self.state.after(scrape(self.state.url, max(self._interval_s, 2.0)))
            self._on_answer()
            self._stop.wait(self._interval_s)
