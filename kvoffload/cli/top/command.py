"""`kvoffload top`: the numbers of running servers in a terminal, or printed once."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvoffload.cli import signals
from kvoffload.cli.exits import Exit, say
from kvoffload.cli.parser import seconds

if TYPE_CHECKING:
    from kvoffload.cli.top.server import State

HELP = "watch running servers by their metrics"
_QUIT = ("q", "Q", "\x1b")
_UP, _DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
_BACK, _ON = ("b", "\x1b[5~"), (" ", "\x1b[6~")
_NEXT = "\t"
_LEAST_INTERVAL_S = 0.1
_TIMEOUT_S = 10.0  # of a single scrape
_SCHEMA = 1  # of the JSON output; raised when a name changes its meaning or goes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    add = parser.add_argument
    add(
        "urls",
        metavar="URL",
        nargs="+",
        help="of the metrics, HOST:PORT, or a PORT of this machine: kvoffload's own port, or that of `vllm serve`",
    )
    add("--interval", metavar="SECONDS", type=seconds, default=2.0, help="between two scrapes (default: 2)")
    add("--once", action="store_true", help="print the numbers once and exit, as also without a terminal")
    add("--json", action="store_true", help="print the numbers once as JSON and exit")


def run(args: argparse.Namespace) -> int:
    """Show the numbers until the user quits.

    Raises:
        KVOffloadError: a URL is not valid.
    """
    with signals.importing():
        from kvoffload.cli.top import screen, summary, view  # noqa: F401  # they bring rich and prometheus-client
        from kvoffload.cli.top.server import page_url

    urls = [page_url(url) for url in args.urls]
    if args.json:
        return _print_json(_scrape_all(urls))
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _print_once(_scrape_all(urls))
    with suppress(KeyboardInterrupt):  # the usual way to leave
        _watch(urls, max(args.interval, _LEAST_INTERVAL_S))
    return Exit.OK


def _scrape_all(urls: list[str]) -> list[State]:
    from kvoffload.cli.top.server import State, scrape

    states = [State(url).after(scrape(url, _TIMEOUT_S)) for url in urls]
    for state in states:
        if state.problem:
            say(f"{state.url}: {state.problem}")
    return states


def _code(states: list[State]) -> int:
    return Exit.FAILED if any(state.problem for state in states) else Exit.OK


def _print_once(states: list[State]) -> int:
    from rich.console import Console

    from kvoffload.cli.top.view import details, engines_of

    console = Console(highlight=False, markup=False, emoji=False)
    for engine in engines_of(states, time.time()):
        console.print(details(engine, console.width))
    return _code(states)


def _print_json(states: list[State]) -> int:
    import json
    from dataclasses import asdict

    from kvoffload.cli.top.summary import summarize
    from kvoffload.telemetry.provenance import describe_process

    now = time.time()
    servers = [
        {
            "url": state.url,
            "problem": state.problem or None,
            "engines": [asdict(summarize(name, history, now)) for name, history in state.engines.items()],
        }
        for state in states
    ]
    print(
        json.dumps(
            {"schema": _SCHEMA, "kind": "top", "seen_from": describe_process(now), "servers": servers},
            indent=2,
        )
    )
    return _code(states)


def _quits(key: str) -> bool:
    return key.startswith(_QUIT) and key not in (*_UP, *_DOWN, *_BACK, *_ON)


def _watch(urls: list[str], interval_s: float) -> None:
    from kvoffload.cli.top.screen import Scrolled, Terminal
    from kvoffload.cli.top.server import Scraper
    from kvoffload.cli.top.view import engines_of, show

    chosen = offset = 0
    with Terminal() as terminal:
        scrapers = [Scraper(url, interval_s, terminal.wake) for url in urls]
        try:
            while not _quits(key := terminal.wait()):
                states = [scraper.state for scraper in scrapers]
                engines = engines_of(states, time.time())
                chosen = (chosen + (key == _NEXT)) % max(len(engines), 1)
                page_lines = terminal.height - 3
                offset += (key in _DOWN) - (key in _UP) + page_lines * ((key in _ON) - (key in _BACK))
                keys = "q quit, j/k or arrows and space/b scroll" + (
                    ", tab next engine" if len(engines) > 1 else ""
                )
                head = f"kvoffload top  {time.strftime('%H:%M:%S')}, every {interval_s:g} s"
                page = Scrolled(head, partial(show, states, engines, chosen), max(offset, 0), keys)
                terminal.draw(page)
                offset = page.offset
        finally:
            for scraper in scrapers:
                scraper.close()
