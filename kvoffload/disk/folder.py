"""Where an engine's disk tier keeps its files: a folder for each fingerprint, and in it one for each replica.

disk_path/                       weights.json: digests of weight files
    <fingerprint>/               identity.json: what the fingerprint is of, for people
        replica0/                lock, index, slots0, slots1, ...
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoffload.disk.identity import KVIdentity
from kvoffload.model.errors import DiskError

_OURS = os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = "lock"
_LONGEST_HOLDER = 200  # characters shown


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Where an engine's files belong.

    Args:
        root: `disk_path`.
        identify: returns the identity of the engine's KV; may read all weights, so it is called on a thread.
        replica: the engine's number among data-parallel ones.
    """

    root: Path
    identify: Callable[[], KVIdentity]
    replica: int = 0

    def make_folder(self) -> Path:
        """Return the folder; create it if it is missing.

        Raises:
            DiskError: it cannot be made, or the weights cannot be read.
        """
        return make_folder(self.root, self.identify(), self.replica)


class TierFolder:
    """An engine's folder, locked for this process until it is closed. `lock_folder` makes it.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)


def tier_folder(root: Path, identity: KVIdentity, replica: int) -> Path:
    """Return the folder of one engine's files.

    Args:
        root: `disk_path`.
        identity: of its KV.
        replica: its number among data-parallel engines.
    """
    return root / identity.fingerprint / f"replica{replica}"


def slot_path(folder: Path, rank: int) -> Path:
    """Return a rank's slot file."""
    return folder / f"slots{rank}"


def make_folder(root: Path, identity: KVIdentity, replica: int) -> Path:
    """Return the folder of one engine's files; create it, open to this user alone, if it is missing.

    Raises:
        DiskError: it cannot be made, or a folder below `root` is a link.
    """
    folder = tier_folder(root, identity, replica)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OURS))
        _describe(folder.parent / "identity.json", identity)
    except OSError as error:
        raise DiskError(f"disk_path: the folder {folder} cannot be made or used: {error.strerror}") from error
    return folder


def lock_folder(folder: Path) -> TierFolder:
    """Lock a folder for this process.

    Raises:
        DiskError: another process, which the message names, has it locked, or the disk fails.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | _OURS, 0o600)
    except OSError as error:
        raise DiskError(f"disk_path: {folder} cannot be locked: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        who = os.pread(lock, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise DiskError(
                f"disk_path: {folder} is in use by {who or 'another process'}; give each engine a disk_path of its own"
            ) from error
        raise DiskError(f"disk_path: {folder} cannot be locked: {error.strerror}") from error
    return TierFolder(folder, lock)


def _describe(path: Path, identity: KVIdentity) -> None:
    """Write for people what the fingerprint was computed from."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OURS, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        json.dump(identity.as_parts(), file, indent=2, sort_keys=True)
        file.write("\n")
