"""The stores that `bench remote` measures, each started from its wheel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvoffload.cli import signals
from kvoffload.cli.demo.store import environment, quiet_client
from kvoffload.remote.local import LocalBucket, LocalMooncake

STORES = {"mooncake": "Mooncake", "s3": "SeaweedFS (S3)"}


@contextmanager
def started(store: str, node_bytes: int) -> Iterator[LocalMooncake | LocalBucket]:
    """Start a store; while it runs, the environment has what reaches it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvoffload-bench-", ignore_cleanup_errors=True) as folder,
        quiet_client(),
    ):
        at = Path(folder)
        server = LocalMooncake(at, node_bytes) if store == "mooncake" else LocalBucket(at)
        with closing(server), signals.undone_on_exit(server.close), environment(server.environment):
            yield server
