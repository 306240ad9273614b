"""Real stores for the time of a test; without what they need, the test is skipped."""

from __future__ import annotations

from ctypes.util import find_library
from pathlib import Path

import pytest

from kvoffload.remote.local import LocalBucket, LocalMooncake

__all__ = ["Bucket", "Mooncake"]

Bucket = LocalBucket


class Mooncake(LocalMooncake):
    """A master and one store node."""

    def __init__(self, folder: Path, node_bytes: int = 2**28) -> None:
        if find_library("ibverbs") is None:
            pytest.skip("libibverbs1 is not installed: make tools")
        super().__init__(folder, node_bytes)
