"""Opens the store that an address names. Its client is imported only then."""

from __future__ import annotations

from kvoffload.remote.address import MooncakeAddress, RemoteAddress
from kvoffload.remote.store import RemoteStore


def open_store(address: RemoteAddress, timeout_s: float) -> RemoteStore:
    """Connect to a store. Blocks.

    Args:
        address: of it.
        timeout_s: seconds that a store may take to accept the connection.

    Raises:
        RemoteError: it does not answer, refuses, or its client is not installed.
    """
    if isinstance(address, MooncakeAddress):
        from kvoffload.remote.mooncake import MooncakeStore

        return MooncakeStore(address, timeout_s)
    from kvoffload.remote.bucket import BucketStore

    return BucketStore(address, timeout_s)
