"""The address to serve metrics at: HOST:PORT, or PORT on the loopback."""

from __future__ import annotations

import argparse
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """Return the address, for `type=`; an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or is_bare_ipv6:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT or PORT, with a port of 0 to 65535")
    return Address(host.strip("[]") or LOOPBACK, int(port))
