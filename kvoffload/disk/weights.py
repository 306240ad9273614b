"""The identity of a model's weights: a snapshot's commit, or a digest of all bytes of its folder.

A digest takes as long as reading the weights, so it is computed on a separate thread and remembered by inode, size and time of change
(ctime), which no program can set. A file that changed a moment ago could change again within the same tick of the
clock, so its digest is not remembered.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from kvoffload.disk.system import sync_folder
from kvoffload.model.errors import DiskError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 2**23
_SETTLED_NS = 2 * 10**9  # coarser than any file system's clock


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a folder in a Hugging Face cache, None for any other folder.

    The files of such a snapshot are links to blobs that are named by their content. A file that was put in their place
    makes the folder any other.
    """
    if not _COMMIT.fullmatch(folder.name) or folder.parent.name != "snapshots":
        return None
    blobs = (folder.parent.parent / "blobs").resolve()
    files = list(_files(folder))
    if not files or not all(path.is_symlink() and path.resolve().parent == blobs for path in files):
        return None
    return folder.name


def weights_identity(
    folder: Path, memory: Path, *, loaded_ns: int | None = None, now_ns: Callable[[], int] = time.time_ns
) -> str:
    """Return the identity of a model's weights; may read all of their bytes.

    Args:
        folder: of the model.
        memory: file in which digests are remembered.
        loaded_ns: before the engine began to load the weights, in nanoseconds since 1970. A file that changed after it may
            not be what the engine loaded.
        now_ns: nanoseconds since 1970, on the clock of the file system.

    Raises:
        DiskError: the weights cannot be read, change meanwhile, or changed since they were loaded.
    """
    if (commit := snapshot_commit(folder)) is not None:
        return f"commit {commit}"
    with _alone(memory):
        return f"digest {_digest_of(folder, memory, loaded_ns, now_ns)}"


def _digest_of(folder: Path, memory: Path, loaded_ns: int | None, now_ns: Callable[[], int]) -> str:
    reader = _Reader(_recall(memory), loaded_ns, now_ns)
    try:
        digests = {str(path.relative_to(folder)): reader.digest(path) for path in sorted(_files(folder))}
    except OSError as error:
        raise DiskError(f"the weights in {folder} cannot be read: {error}") from error
    if not digests:
        raise DiskError(
            f"the weights in {folder} cannot be distinguished from others: the folder has no files"
        )
    _remember(memory, reader.known)
    return xxh3_128(json.dumps(digests).encode()).hexdigest()


@contextmanager
def _alone(memory: Path) -> Iterator[None]:
    """Let one process at a time compute digests: the engines of a server start together and read the same files."""
    lock = None
    with suppress(OSError):  # without a lock it only takes longer
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(memory.with_name(f"{memory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files of a model, hidden ones apart: weights, settings and code all change what it computes."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


@dataclass(slots=True)
class _Reader:
    """Digests files.

    Args:
        known: digests by device and inode, each with size and time of change; grows.
        loaded_ns: no file may have changed after it; None for any time.
        now_ns: nanoseconds since 1970.
    """

    known: dict[str, list[Any]]
    loaded_ns: int | None
    now_ns: Callable[[], int] = field(default=time.time_ns)

    def digest(self, path: Path) -> str:
        began = self.now_ns()
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            if self.loaded_ns is not None and before.st_ctime_ns > self.loaded_ns:
                raise DiskError(
                    f"{path} has changed since this engine started, so which of its bytes were loaded is not known; "
                    "start again, or set disk_identity"
                )
            place, mark = f"{before.st_dev}:{before.st_ino}", [before.st_size, before.st_ctime_ns]
            if (found := self.known.get(place)) is not None and found[:2] == mark:
                return str(found[2])
            state, left = xxh3_128(), before.st_size  # no further: a growing file could be read for ever
            while chunk := file.read(min(_CHUNK, left)):
                state.update(chunk)
                left -= len(chunk)
            after = os.fstat(file.fileno())
        if [after.st_size, after.st_ctime_ns] != mark:
            raise DiskError(f"{path} changes while it is read; start again when it is whole")
        if began - before.st_ctime_ns > _SETTLED_NS:
            self.known[place] = [*mark, state.hexdigest()]
        return state.hexdigest()


def _recall(memory: Path) -> dict[str, list[Any]]:
    """Return remembered digests by device and inode; what cannot be read is computed again."""
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, list) and list(map(type, value)) == [int, int, str]
    }


def _remember(memory: Path, known: dict[str, list[Any]]) -> None:
    """Replace the memory at once; without it the next start only takes longer."""
    beside = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(known, file)
        beside.rename(memory)
        sync_folder(memory.parent)
    except OSError:
        return
