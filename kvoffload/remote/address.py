"""The address of a remote tier, parsed from the setting `remote_url`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from kvoffload.disk.identity import KVIdentity
from kvoffload.model.errors import ConfigError

_FORMS = '"mooncake://HOST:PORT?protocol=tcp" or "s3://BUCKET/PREFIX"'
_PROTOCOLS = ("tcp", "rdma")
_ENDPOINTS = "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """The address of a Mooncake Store's master.

    Args:
        host, port: where the master listens.
        protocol: "tcp" or "rdma".
    """

    host: str
    port: int
    protocol: str = "tcp"

    @property
    def caution(self) -> str:
        """Return a warning for the operator that Mooncake does not protect values."""
        return (
            f"Mooncake has no authentication and no encryption: anyone who reaches {self} can read and write all KV in it, and "
            "each store node and each engine listens for transfers on all addresses of its machine"
        )

    def __str__(self) -> str:
        return f"mooncake://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """The address of an S3 bucket. Endpoint, region and credentials come from the environment (`AWS_*`).

    Args:
        bucket: the bucket's name.
        prefix: all objects' names begin with this; it is empty or ends with a slash.
    """

    bucket: str
    prefix: str = ""

    @property
    def caution(self) -> str:
        """Return a warning for the operator if connections may be unencrypted; otherwise ""."""
        is_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
        is_plain = any(os.environ.get(name, "").lower().startswith("http://") for name in _ENDPOINTS)
        if not is_allowed and not is_plain:
            return ""
        return (
            f"{self} may be reached by http without TLS (by AWS_ALLOW_HTTP or an endpoint): anyone on the network path can read and "
            "change all KV, and read the session token of the credentials"
        )

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


RemoteAddress = MooncakeAddress | BucketAddress


def parse_address(url: str) -> RemoteAddress:
    """Parse the setting `remote_url`.

    Raises:
        ConfigError: the URL has an unknown form or contains credentials. The message does not repeat the credentials.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _wrong() from None
    if "@" in parts.netloc:
        raise ConfigError(
            [
                "remote_url contains credentials; pass them by the environment (S3: AWS_ACCESS_KEY_ID and others)"
            ]
        )
    if parts.scheme == "mooncake" and parts.hostname and port and parts.path in ("", "/"):
        return MooncakeAddress(parts.hostname, port, _protocol(parts.query))
    if parts.scheme == "s3" and parts.netloc and not (parts.query or parts.fragment):
        return BucketAddress(parts.netloc, _prefix(parts.path))
    raise _wrong()


def _prefix(path: str) -> str:
    """Return the prefix of all objects' names, made from the path of a URL."""
    prefix = path.removeprefix("/").removesuffix("/")
    if prefix and {"", ".", ".."} & set(prefix.split("/")):
        raise ConfigError(
            [
                'remote_url: a PREFIX is names with one "/" between two of them, such as "team/kv"; none is empty, "." or ".."'
            ]
        )
    return f"{prefix}/" if prefix else ""


def _protocol(query: str) -> str:
    options = dict(parse_qsl(query, keep_blank_values=True))
    protocol = options.pop("protocol", "tcp")
    if options or protocol not in _PROTOCOLS:
        raise ConfigError(
            [f"remote_url: Mooncake has one option, protocol, which is {' or '.join(_PROTOCOLS)}"]
        )
    return protocol


def _wrong() -> ConfigError:
    return ConfigError([f"remote_url has an unknown form; it must be {_FORMS}"])


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Determines where an engine's blocks are in a remote tier.

    Args:
        address: the remote tier's address.
        identify: returns the identity of the engine's KV. It may read all weights, so it is called on a thread of the
            remote tier.
    """

    address: RemoteAddress
    identify: Callable[[], KVIdentity]
