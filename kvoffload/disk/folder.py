"""The disk tier's folders: a folder for each fingerprint, which contains a folder for each replica.

disk_path/                       weights.json: digests of weight files
    <fingerprint>/               identity.json: the parts of the fingerprint, for people and for the log
        replica0/                lock, index, slots0, slots1, ...
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import DiskInUse, OpenFolder, close_locked, lock, open_folder, open_root
from kvoffload.model.errors import DiskError

_LOCK, _DESCRIPTION = "lock", "identity.json"
_LONGEST_DESCRIPTION = 2**20
_LONGEST_HOLDER = 200  # the maximum number of characters that an error quotes from the lock file


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Determines the folder of an engine's files.

    Args:
        root: the setting `disk_path`.
        identify: returns the identity of the engine's KV. It may read all weights, so it is called on a thread of the
            disk tier.
        replica: the index of this engine among the data-parallel engines.
    """

    root: Path
    identify: Callable[[], KVIdentity]
    replica: int = 0

    def make_folder(self) -> OpenFolder:
        """Open the folder of the engine's files, and create the folder if it is missing.

        Raises:
            DiskError: the folder cannot be created, or the weights cannot be read.
        """
        return make_folder(self.root, self.identify(), self.replica)


def make_folder(root: Path, identity: KVIdentity, replica: int) -> OpenFolder:
    """Open the folder of one engine's files. If the folder is missing, create it for this user only.

    Raises:
        DiskError: the folder cannot be created, or a folder below `root` does not belong to this user.
    """
    path = root / identity.fingerprint / f"replica{replica}"
    try:
        with open_root(root) as opened, opened.make(identity.fingerprint) as parent:
            folder = parent.make(path.name)
    except OSError as error:
        raise DiskError(f"disk_path: the folder {path} cannot be made or used: {error.strerror}") from error
    folder.fingerprint = identity.fingerprint
    return folder


def describe(folder: OpenFolder, identity: KVIdentity) -> list[str]:
    """Write the parts of the fingerprint to `identity.json` above a locked folder of `make_folder`.

    Returns:
        The names of the parts that the file had otherwise: the folder was made for other KV, and then renamed, copied
        or restored under this name.

    Raises:
        DiskError: the file or its folder does not belong to this user.
        OSError: the disk is full, failing or gone.
    """
    text = json.dumps(identity.as_parts(), indent=2, sort_keys=True) + "\n"
    with open_folder(folder.path.parent) as parent:
        found = _read_description(parent)
        if found == text:
            return []
        new = f"{_DESCRIPTION}.{folder.path.name}"  # other replicas may write the file at the same time
        with os.fdopen(parent.make_file(new), "w") as file:
            file.write(text)
        parent.rename(new, _DESCRIPTION)
    return _other_parts(found, text)


def caution(root: Path) -> str:
    """Return a warning if other users could replace `disk_path` or this user's folders in it; otherwise "".

    A group counts as other users, because its members can change.
    """
    path = root.absolute()
    for each in (path, *path.parents):
        try:
            mode = each.stat().st_mode
        except OSError:
            continue
        if mode & (stat.S_IWOTH | stat.S_IWGRP) and not mode & stat.S_ISVTX:
            who = "every user" if mode & stat.S_IWOTH else "every user of its group"
            return (
                f"{who} may rename and remove what is in {each} ({stat.filemode(mode)}): chmod go-w, or +t, "
                "or name another disk_path"
            )
    return ""


def lock_folder(folder: OpenFolder) -> OpenFolder:
    """Lock a folder for this process, and return the folder. It stays locked until it is closed.

    If the folder cannot be locked, it is closed.

    Raises:
        DiskInUse: another process has locked the folder; the message names that process.
        DiskError: the lock file does not belong to this user, or the disk fails.
    """
    try:
        folder.lock = _locked(folder)
    except BaseException as error:
        folder.close()
        if isinstance(error, OSError):
            raise DiskError(f"disk_path: {folder.path} cannot be locked: {error.strerror}") from error
        raise
    return folder


def _locked(folder: OpenFolder) -> int:
    descriptor = folder.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        lock(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError as error:
        who = os.pread(descriptor, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise DiskInUse(
            f"disk_path: {folder.path} is in use by {who or 'another process'}; give each engine a disk_path of its own"
        ) from error
    except BaseException:
        close_locked(descriptor)
        raise
    return descriptor


def _read_description(folder: OpenFolder) -> str:
    try:
        descriptor = folder.open(_DESCRIPTION, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, errors="replace") as file:
        return file.read(_LONGEST_DESCRIPTION)


def _other_parts(found: str, text: str) -> list[str]:
    """Return the names of the parts that differ. Bytes that a power failure has left describe nothing."""
    try:
        before, now = dict(json.loads(found)), json.loads(text)
    except (RecursionError, TypeError, ValueError):
        return []
    return [name for name in now if before.get(name) != now[name]]
