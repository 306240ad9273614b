"""`kvoffload demo`: its options, and its start. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvoffload.cli import signals
from kvoffload.cli.demo import options
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.exits import CommandError, Exit

HELP = "run the same conversations without and with offloading, and compare them token by token"

add_arguments = options.add_arguments


@contextmanager
def _tiers_for(asked: DemoOptions) -> Iterator[DemoOptions]:
    """Make the disk's folder or the store, if the demo has a tier below the host.

    Raises:
        CommandError: it cannot be made or reached.
    """
    with _folder_for(asked) as asked:
        if asked.remote is None:
            yield asked
            return
        from kvoffload.cli.demo.store import store_for

        with store_for(asked.remote) as url:
            yield replace(asked, offload={**asked.offload, "remote_url": url})


@contextmanager
def _folder_for(asked: DemoOptions) -> Iterator[DemoOptions]:
    """Put the disk's files into a folder of their own, which is removed at the end.

    Raises:
        CommandError: it cannot be made.
    """
    if asked.disk is None:
        yield asked
        return
    try:
        folder = tempfile.TemporaryDirectory(
            prefix="kvoffload-demo-", dir=asked.disk, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise CommandError(f"--disk {asked.disk}: no folder can be made in it: {error.strerror}") from error
    with folder as path:
        yield replace(asked, offload={**asked.offload, "disk_path": path})


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Raises:
        KVOffloadError: it cannot run as asked.
    """
    asked = options.demo_options(args)
    screen = Screen(quiet=asked.as_json)
    screen.progress("importing torch")
    # torch reads this when it is loaded. Threads that spin while they wait for each other take the cores from everything
    # else: on two busy cores the demo takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with signals.importing():
        from kvoffload.cli.demo.restart import run_restart
        from kvoffload.cli.demo.session import run_demo
        from kvoffload.cli.demo.shared import run_shared
        from kvoffload.engine import ConfigError, EngineError, PluginError, RequestRefused
        from kvoffload.logs import configure

    configure(level=logging.WARNING)
    try:
        with _tiers_for(asked) as asked:
            run_it = run_restart if asked.restart else run_shared if asked.remote else run_demo
            return signals.run_async(run_it(asked, screen))
    except (ConfigError, PluginError, RequestRefused) as error:
        raise CommandError(str(error)) from error
    except EngineError as error:
        screen.say(f"the engine could not go on: {error}")
        return Exit.FAILED
