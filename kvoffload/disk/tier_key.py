"""The tier key: engines read it from `tier_key_file` and use it to authenticate the blocks of lower tiers."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from kvoffload.disk.open_folder import SAFE
from kvoffload.model.errors import ConfigError

LEAST_BYTES, MOST_BYTES = 32, 4096
SUM_BYTES = 8
"""The length in bytes of a MAC that takes the place of a checksum in the disk tier's files.

Eight bytes are enough. A forger can test a guess only by letting an engine read the block, and the engine drops the
block if the guess is wrong.
"""

_ALLOWED = (
    "it must be a plain file of user {} that group and others cannot use (mode 0600 or 0400), "
    f"of {LEAST_BYTES:,} to {MOST_BYTES:,} bytes"
)


class TierKey:
    """A key that makes message authentication codes (HMAC-SHA256). Several threads may use it at once.

    Args:
        secret: the secret bytes. All engines that share blocks need the same secret.

    Attributes:
        id: 16 hexadecimal digits that identify the key and do not reveal the secret.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = self.mac(b"id").hex()[:16]

    def mac(self, context: bytes, *data: bytes | memoryview) -> bytes:
        """Return a MAC of `context` and `data`. It has 32 bytes and cannot be computed without the secret.

        Args:
            context: the kind and the position of the data. The first word must be different for each use of the key.
            data: pieces of bytes; the MAC is the same however the bytes are divided into pieces.
        """
        state = hmac.new(self._secret, len(context).to_bytes(8, "little") + context, "sha256")
        for piece in data:
            state.update(piece)  # releases the GIL for pieces over 2 KiB
        return state.digest()

    def sum(self, context: bytes, *data: bytes | memoryview) -> int:
        """Return the first 64 bits of the MAC as an integer, to be used like a checksum."""
        return int.from_bytes(self.mac(context, *data)[:SUM_BYTES], "little")

    def of(self, fingerprint: str) -> TierKey:
        """Return a key for the files of one fingerprint, derived from this key."""
        return TierKey(self.mac(b"fingerprint " + fingerprint.encode()))


def are_equal(one: int, other: int) -> bool:
    """Return whether two sums are equal, in a time that does not depend on the sums."""
    return hmac.compare_digest(one.to_bytes(SUM_BYTES, "little"), other.to_bytes(SUM_BYTES, "little"))


def read_tier_key(path: Path | None) -> TierKey | None:
    """Read the tier key from a file. Return None if `path` is None.

    Raises:
        ConfigError: the file cannot be read, is not a plain file that only this user can read, or has the wrong length.
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
