"""Scrapes a server again and again, on a thread of its own, so that keys are heard while an answer takes long."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.cli.exits import CommandError
from kvoffload.cli.top.reading import Change, PageError, Reading, has_restarted, parse_page

_PATH = "/metrics"
_LARGEST_PAGE = 64 << 20
_ACCEPT = "text/plain; version=0.0.4"


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a server.

    Args:
        change: the last two readings; None before the first.
        problem: why there is no newer one; empty while all is well.
        restarts: how often the server was seen to have begun anew.
    """

    change: Change | None = None
    problem: str = ""
    restarts: int = 0

    def after(self, result: Reading | str) -> State:
        """Return the state after one more scrape, or after what went wrong with it."""
        if isinstance(result, str):
            return State(self.change, result, self.restarts)
        before = self.change.now if self.change is not None else None
        if before is not None and has_restarted(result, before):
            return State(Change(result), "", self.restarts + 1)
        return State(Change(result, before), "", self.restarts)


def page_url(text: str) -> str:
    """Return the URL of a page of metrics from what somebody typed: a URL, or HOST:PORT.

    Raises:
        CommandError: it is neither.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise CommandError(
            f"{text!r} is not the URL of a page of metrics, such as http://127.0.0.1:9464/metrics"
        )
    return urllib.parse.urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else url


def scrape(url: str, timeout_s: float) -> Reading | str:
    """Return one reading, or what went wrong, in words."""
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
        http.client.HTTPException,
    ) as error:  # the server died in the middle of its answer, or hangs
        return f"not reachable: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"


class Scraper:
    """Scrapes until it is closed.

    Args:
        url: of the page.
        interval_s: from one scrape's end to the next one's begin.
        told: called on the scraping thread after each.
    """

    def __init__(self, url: str, interval_s: float, on_start: Callable[[], object]) -> None:
        self.state = State()
        self._url = url
        self._interval_s = interval_s
        self._on_start = on_start
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="kvoffload-top", daemon=True).start()

    def close(self) -> None:
        """Scrape no more. An answer that is still awaited keeps nobody."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.state = self.state.after(scrape(self._url, max(self._interval_s, 2.0)))
            self._on_start()
            self._stop.wait(self._interval_s)
