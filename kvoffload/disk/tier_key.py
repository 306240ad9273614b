"""The key with which engines authenticate what they keep on disk and in a remote store, and how it is read from `tier_key_file`."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from kvoffload.disk.open_folder import SAFE
from kvoffload.model.errors import ConfigError

LEAST_BYTES, MOST_BYTES = 32, 4096
SUM_BYTES = 8
"""Of a MAC that takes a checksum's place in the disk's files. Only an engine can test a guess, and each wrong one costs it a block."""

_ALLOWED = (
    "it must be a plain file of user {} that group and others cannot use (mode 0600 or 0400), "
    f"of {LEAST_BYTES:,} to {MOST_BYTES:,} bytes"
)


class TierKey:
    """Makes message authentication codes (HMAC-SHA256), from several threads at once.

    Args:
        secret: the bytes that all engines which share blocks have.

    Attributes:
        id: 16 hexadecimal digits that tell this key from others, and say nothing about it.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = self.mac(b"id").hex()[:16]

    def mac(self, context: bytes, *data: bytes | memoryview) -> bytes:
        """Return 32 bytes that nobody can make without the secret.

        Args:
            context: what the data is and where it belongs. It begins with a word for each use of the key.
            data: pieces, whose bounds do not matter.
        """
        state = hmac.new(self._secret, len(context).to_bytes(8, "little") + context, "sha256")
        for piece in data:
            state.update(piece)  # of more than 2 KiB without the interpreter's lock
        return state.digest()

    def sum(self, context: bytes, *data: bytes | memoryview) -> int:
        """Return the first 64 bits of a MAC."""
        return int.from_bytes(self.mac(context, *data)[:SUM_BYTES], "little")

    def of(self, fingerprint: str) -> TierKey:
        """Return the key for the files of one fingerprint, which authenticates no other's."""
        return TierKey(self.mac(b"fingerprint " + fingerprint.encode()))


def are_equal(one: int, other: int) -> bool:
    """Compare two sums in a time that does not depend on them."""
    return hmac.compare_digest(one.to_bytes(SUM_BYTES, "little"), other.to_bytes(SUM_BYTES, "little"))


def read_tier_key(path: Path | None) -> TierKey | None:
    """Return the key in a file; None without a file.

    Raises:
        ConfigError: it cannot be read, is no plain file of this user alone, or is too short or too long.
    """
    if path is None:
        return None
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | SAFE)) as file:
            found = os.fstat(file.fileno())
            secret = file.read(MOST_BYTES + 1) if _is_private(found) else b""
    except OSError as error:
        raise _refusal(path, "it is a link" if os.path.islink(path) else str(error.strerror)) from None
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        mode = stat.filemode(found.st_mode)
        raise _refusal(
            path, f"its owner is {found.st_uid}, its mode {mode}, its size {found.st_size:,} bytes"
        )
    return TierKey(secret)


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.geteuid()


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError([f"tier_key_file: {path} is not used: {reason}; {_ALLOWED.format(os.geteuid())}"])
