"""The store of `demo --remote`: one that runs, or a local one that is started for the time of the demo."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from kvoffload.checks.remote import unreachable
from kvoffload.cli import signals
from kvoffload.cli.demo.options import LOCAL_STORES
from kvoffload.cli.exits import CommandError
from kvoffload.model.errors import RemoteError
from kvoffload.remote.address import parse_address
from kvoffload.remote.local import LocalBucket, LocalMooncake

_MAKE: Mapping[str, Callable[[Path], LocalBucket | LocalMooncake]] = dict(
    zip(LOCAL_STORES, (LocalMooncake, LocalBucket), strict=True)
)


@contextmanager
def store_for(remote: str) -> Iterator[str]:
    """Give the URL of a store that answers; a local one and its files are gone afterwards.

    Args:
        remote: a URL, or one of `LOCAL_STORES`.

    Raises:
        CommandError: what it needs is not installed, it does not start, or it does not answer.
    """
    with quiet_client():
        if remote in _MAKE:
            with _local(remote) as url:
                _check(remote, url)
                yield url
        else:
            _check(remote, remote)
            yield remote


@contextmanager
def _local(kind: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvoffload-demo-", ignore_cleanup_errors=True) as folder:
        try:
            store = _MAKE[kind](Path(folder))
        except RemoteError as error:
            raise CommandError(f"--remote {kind}: {error}") from error

        def undo() -> None:
            store.close()
            shutil.rmtree(folder, ignore_errors=True)

        with closing(store), signals.undone_on_exit(undo), environment(store.environment):
            yield store.url


def quiet_client() -> AbstractContextManager[None]:
    """Have Mooncake's client write errors only; by default it writes a page of messages at each start."""
    return environment({"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR")})


@contextmanager
def environment(names: Mapping[str, str]) -> Iterator[None]:
    """Have these variables for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check(remote: str, url: str) -> None:
    if (problem := unreachable(parse_address(url))) is not None:
        raise CommandError(f"--remote {remote}: {problem.text}; {problem.remedy}")
