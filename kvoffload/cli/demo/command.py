"""`kvoffload demo`: prepares the disk tier's folder or the remote tier, and runs a session.

Slow imports are inside `run`, so that importing this module is fast.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli import signals
from kvoffload.cli.demo import options
from kvoffload.cli.demo.options import LOCAL_STORES, DemoOptions
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.model.errors import RemoteError
from kvoffload.remote.address import parse_address

if TYPE_CHECKING:
    from kvoffload.remote.local import LocalBucket, LocalMooncake

HELP = "run the same conversations without and with offloading, and compare them token by token"

add_arguments = options.add_arguments

# At the default log level, Mooncake's client logs a page of messages at each start.
_QUIET = {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR")}


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Raises:
        KVOffloadError: the demo cannot run with its options.
    """
    begins = args.until_killed is not None
    asked = DemoOptions(**json.loads(args.until_killed)) if begins else options.demo_options(args)
    screen = Screen(quiet=begins or args.json)
    screen.progress("importing torch")
    # torch reads the variable during its import. By default, OpenMP's threads spin while they wait for each other,
    # which makes the demo several times slower on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvoffload.cli.demo import session
    from kvoffload.engine import ConfigError, EngineError, PluginError, RequestRefused

    logging.basicConfig()
    try:
        if begins:
            return signals.run_async(session.play_until_killed(asked))
        with _lasting(args) as settings:
            asked = replace(asked, offload={**asked.offload, **settings})
            return signals.run_async(session.run_demo(asked, screen, args))
    except (ConfigError, PluginError, RequestRefused) as error:
        raise CommandError(str(error)) from error
    except EngineError as error:
        screen.say(f"the engine could not continue: {error}")
        return Exit.FAILED


@contextmanager
def local_store(kind: str, node_bytes: int = 2**28) -> Iterator[LocalMooncake | LocalBucket]:
    """Run a remote tier's server on this machine during the `with` block, and set its clients' environment variables.

    Args:
        kind: a key of `LOCAL_STORES`.
        node_bytes: the memory that a Mooncake server provides for blocks, in bytes.

    Raises:
        RemoteError: the server is not installed, or does not start.
    """
    from kvoffload.remote import local

    with _scratch("kvoffload-store-") as folder, _environment(_QUIET):
        store = local.LocalMooncake(folder, node_bytes) if kind == "mooncake" else local.LocalBucket(folder)
        with closing(store), _environment(store.environment):
            yield store


@contextmanager
def _lasting(args: argparse.Namespace) -> Iterator[Mapping[str, object]]:
    """Prepare what outlives an engine, as the options say, and yield the setting with its folder or URL.

    If nothing does, yield no setting.

    Raises:
        CommandError: the folder cannot be created, or the remote tier cannot be reached.
    """
    with ExitStack() as opened:
        if args.disk is not None or args.host_path is not None:
            name, parent = (
                ("disk_path", args.disk) if args.disk is not None else ("host_path", args.host_path)
            )
            try:
                folder = opened.enter_context(_scratch("kvoffload-demo-", parent))
            except OSError as error:
                option = name.removesuffix("_path") if args.disk is not None else "host-path"
                wanted = "must be a folder in which this user can make one"
                raise CommandError(f"--{option} {parent}: {wanted}: {error.strerror}") from error
            yield {name: str(folder)}
        elif args.remote is not None:
            opened.enter_context(_environment(_QUIET))
            try:
                is_local = args.remote in LOCAL_STORES
                url = opened.enter_context(local_store(args.remote)).url if is_local else args.remote
            except RemoteError as error:
                raise CommandError(f"--remote {args.remote}: {error}") from error
            from kvoffload.checks.outputs import unreachable

            if (problem := unreachable(parse_address(url))) is not None:
                raise CommandError(f"--remote {args.remote}: {problem.text}; {problem.remedy}")
            yield {"remote_url": url}
        else:
            yield {}


@contextmanager
def _scratch(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """Create a temporary folder, which is removed when the `with` block ends."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _environment(names: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the `with` block."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
