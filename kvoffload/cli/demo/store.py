"""The store of `demo --remote`, which runs already or is started for the demo; benches start theirs here too."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

from kvoffload.checks.remote import unreachable
from kvoffload.cli import signals
from kvoffload.cli.demo.options import LOCAL_STORES
from kvoffload.cli.exits import CommandError
from kvoffload.model.errors import RemoteError
from kvoffload.remote.address import parse_address
from kvoffload.remote.local import LocalBucket, LocalMooncake


@contextmanager
def store_for(remote: str) -> Iterator[str]:
    """Yield the URL of a store that answers.

    Args:
        remote: a URL, or one of `LOCAL_STORES`.

    Raises:
        CommandError: what it needs is not installed, it does not start, or it does not answer.
    """
    with ExitStack() as opened:
        opened.enter_context(_quiet_client())
        try:
            url = opened.enter_context(local_store(remote)).url if remote in LOCAL_STORES else remote
        except RemoteError as error:
            raise CommandError(f"--remote {remote}: {error}") from error
        if (problem := unreachable(parse_address(url))) is not None:
            raise CommandError(f"--remote {remote}: {problem.text}; {problem.remedy}")
        yield url


@contextmanager
def local_store(kind: str, node_bytes: int = 2**28) -> Iterator[LocalMooncake | LocalBucket]:
    """Run a store on this machine, with the environment variables that reach it; its files are removed afterwards.

    Args:
        kind: one of `LOCAL_STORES`.
        node_bytes: memory of Mooncake's node.

    Raises:
        RemoteError: it is not installed, or does not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvoffload-store-", ignore_cleanup_errors=True) as folder,
        _quiet_client(),
    ):
        at = Path(folder)
        store = LocalMooncake(at, node_bytes) if kind == "mooncake" else LocalBucket(at)

        def undo() -> None:
            store.close()
            shutil.rmtree(folder, ignore_errors=True)

        with closing(store), signals.undone_on_exit(undo), _environment(store.environment):
            yield store


def _quiet_client() -> AbstractContextManager[None]:
    """Limit the messages of Mooncake's client to errors; by default it writes a page of them at each start."""
    return _environment({"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR")})


@contextmanager
def _environment(names: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for this process and its children, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
