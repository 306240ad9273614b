"""`kvoffload top`: what the command line needs of it."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress

from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import seconds

HELP = "watch a running server by its metrics"
_QUIT = ("q", "Q", "\x1b")
_LEAST_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "url",
        metavar="URL",
        help="of the metrics, or HOST:PORT: kvoffload's own port, or that of `vllm serve`",
    )
    add("--interval", metavar="SECONDS", type=seconds, default=2.0, help="between two looks (default 2)")
    add(
        "--once",
        action="store_true",
        help="print the numbers once and end, as it also does without a terminal",
    )


def run(args: argparse.Namespace) -> int:
    """Show the numbers until somebody has had enough.

    Raises:
        KVOffloadError: the URL is none.
    """
    from kvoffload.cli.top.server import page_url

    url = page_url(args.url)
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _print_once(url)
    with suppress(KeyboardInterrupt):  # the usual way to leave
        _watch(url, max(args.interval, _LEAST_INTERVAL_S))
    return Exit.OK


def _print_once(url: str) -> int:
    from kvoffload.cli.top.reading import Change
    from kvoffload.cli.top.server import scrape
    from kvoffload.cli.top.view import show

    reading = scrape(url, 10.0)
    if isinstance(reading, str):
        print(f"kvoffload: {url}: {reading}", file=sys.stderr)
        return Exit.FAILED
    print(url)
    for line in show(Change(reading), time.time()):
        print(f"! {line.text}" if line.alarm else line.text)
    return Exit.OK


def _watch(url: str, interval_s: float) -> None:
    from kvoffload.cli.top.page import page
    from kvoffload.cli.top.screen import Terminal
    from kvoffload.cli.top.server import Scraper

    with Terminal() as terminal:
        scraper = Scraper(url, interval_s, terminal.wake)
        try:
            while not terminal.wait().startswith(_QUIT):
                terminal.draw(page(url, scraper.state, interval_s, time.time()))
        finally:
            scraper.close()
