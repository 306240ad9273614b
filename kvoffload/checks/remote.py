"""The store that engines share: whether its client is installed, whether it answers, and who else can read it."""

from __future__ import annotations

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, warn
from kvoffload.checks.machine import Machine
from kvoffload.model.errors import ConfigError, RemoteError
from kvoffload.remote.address import BucketAddress, MooncakeAddress, RemoteAddress, parse_address

_PATIENCE_S = 2.0


def unreachable(address: RemoteAddress) -> Finding | None:
    """Return why nothing would be shared in a store; None where it answers."""
    return _no_mooncake(address) if isinstance(address, MooncakeAddress) else _no_bucket(address)


def _remote(setup: Setup, _: Machine) -> Finding:
    url = setup.config.remote_url
    if url is None:
        return go("none: what this engine computes is its own")
    try:
        address = parse_address(url)
    except ConfigError as error:
        return no_go(str(error), "correct remote_url")
    if (problem := unreachable(address)) is not None:
        return problem
    if address.caution:
        return warn(
            address.caution, "keep it in a network that only engines and stores are in, or use TLS (S3)"
        )
    return go(f"{address} answers")


def _no_mooncake(address: MooncakeAddress) -> Finding | None:
    try:
        from kvoffload.remote.mooncake import own_address
        from kvoffload.remote.mooncake_child import load_client

        load_client()
    except (ImportError, RemoteError) as error:
        return no_go(
            f"the Mooncake client cannot be loaded: {error.__cause__ or error}",
            "pip install 'kvoffload[mooncake]' (on a GPU the client's wheel for its CUDA), and install libibverbs1",
        )
    try:
        own_address(address, _PATIENCE_S)
    except RemoteError as error:
        return warn(f"{error}: nothing would be shared", "start the master, or change remote_url")
    return None


def _no_bucket(address: BucketAddress) -> Finding | None:
    from kvoffload.remote.bucket import BucketStore

    try:
        BucketStore(address, _PATIENCE_S).read("kvo1/probe")
    except RemoteError as error:
        if isinstance(error.__cause__, ImportError):
            return no_go(str(error), "pip install 'kvoffload[s3]'")
        return warn(f"{error}: nothing would be shared", "check AWS_ENDPOINT, AWS_REGION and the credentials")
    return None


CHECKS = (Check("remote store", _remote),)
