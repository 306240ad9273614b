"""Identifies a model's weights by a snapshot's commit, or by a digest of all bytes in the model's folder.

Computing a digest takes as long as reading the weights, so it is done on a separate thread. Digests are cached in a
file by inode, size and time of change (ctime), because no program can set a ctime. If a file changed less than two
seconds ago, it could change again without getting a new ctime, so its digest is not cached.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from kvoffload.disk.open_folder import OpenFolder, open_root
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.errors import DiskError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 2**23
_MOST_MEMORY = 2**24  # the maximum number of bytes to read from the file that caches digests
_MAC_BYTES = 32  # the length of the MAC at the end of the file that caches digests
_SETTLED_NS = 2 * 10**9  # longer than a tick of any file system's clock

_Known = dict[str, tuple[int, int, str]]


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a snapshot in a Hugging Face cache; None for any other folder.

    A snapshot's files are links to blobs, and a blob's name is a hash of its content. If one of these links was
    replaced by a file, the commit no longer describes the folder, so the result is None.
    """
    if not _COMMIT.fullmatch(folder.name) or folder.parent.name != "snapshots":
        return None
    blobs = (folder.parent.parent / "blobs").resolve()
    files = list(_files(folder))
    if not files or not all(path.is_symlink() and path.resolve().parent == blobs for path in files):
        return None
    return folder.name


def weights_identity(
    folder: Path,
    memory: Path,
    *,
    key: TierKey | None = None,
    loaded_ns: int | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> str:
    """Return a string that identifies a model's weights. This function may read all of the weights.

    Args:
        folder: the model's folder.
        memory: the file that caches digests.
        key: authenticates the cached digests, because with a forged digest the engine would use the KV of other
            weights. None if every process that writes the file is trusted.
        loaded_ns: a time before the engine began to load the weights, in nanoseconds since 1970. If a file changed
            after this time, the engine may have loaded other bytes, so the file is refused. None allows changes at any
            time.
        now_ns: returns the time in nanoseconds since 1970, by the file system's clock.

    Raises:
        DiskError: another user owns the file that caches digests. Or the weights cannot be read, change while they are
            read, or changed after `loaded_ns`.
    """
    if (commit := snapshot_commit(folder)) is not None:
        return f"commit {commit}"
    try:
        place = open_root(memory.parent)
    except OSError:  # without cached digests, the next start only takes longer
        return _digest_of(folder, _Reader({}, loaded_ns, now_ns))
    with place:
        reader = _Reader(_recall(place, memory.name, key), loaded_ns, now_ns)
        digest = _digest_of(folder, reader)
        with suppress(OSError):  # without cached digests, the next start only takes longer
            _remember(place, memory.name, reader.known, key)
    return digest


def process_began_ns() -> int:
    """Return when this process began, in nanoseconds since 1970. The engine can only have loaded its weights later."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)


def _digest_of(folder: Path, reader: _Reader) -> str:
    try:
        digests = {str(path.relative_to(folder)): reader.digest(path) for path in sorted(_files(folder))}
    except OSError as error:
        raise DiskError(f"the weights in {folder} cannot be read: {error}") from error
    if not digests:
        raise DiskError(
            f"the weights in {folder} cannot be distinguished from others: the folder has no files"
        )
    return f"digest {xxh3_128(json.dumps(digests).encode()).hexdigest()}"


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files of a model except hidden files, because weights, settings and code all change the results."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


@dataclass(slots=True)
class _Reader:
    """Returns digests of files, and computes them only if they are not cached.

    Args:
        known: the cached size, time of change and digest of files, by device and inode. New digests are added here.
        loaded_ns: files that changed after this time are refused; None allows changes at any time.
        now_ns: returns the time in nanoseconds since 1970.
    """

    known: _Known
    loaded_ns: int | None
    now_ns: Callable[[], int] = field(default=time.time_ns)

    def digest(self, path: Path) -> str:
        began = self.now_ns()
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            if self.loaded_ns is not None and before.st_ctime_ns > self.loaded_ns:
                raise DiskError(
                    f"{path} has changed since this engine started, so it is unknown which of its bytes were loaded; "
                    "restart the engine, or set weights_id"
                )
            place, mark = f"{before.st_dev}:{before.st_ino}", (before.st_size, before.st_ctime_ns)
            if (found := self.known.get(place)) is not None and found[:2] == mark:
                return str(found[2])
            # Read at most `before.st_size` bytes, because a file that grows may never end.
            state, left = xxh3_128(), before.st_size
            while chunk := file.read(min(_CHUNK, left)):
                state.update(chunk)
                left -= len(chunk)
            after = os.fstat(file.fileno())
        if (after.st_size, after.st_ctime_ns) != mark:
            raise DiskError(f"{path} changes while it is read; restart the engine when it is complete")
        if began - before.st_ctime_ns > _SETTLED_NS:
            self.known[place] = (*mark, state.hexdigest())
        return state.hexdigest()


def _recall(place: OpenFolder, name: str, key: TierKey | None) -> _Known:
    """Return the cached digests by device and inode. There are none if their file cannot be read or authenticated."""
    try:
        with os.fdopen(place.open(name, os.O_RDONLY), "rb") as file:
            data, mac = file.read(_MOST_MEMORY), b""
        if key is not None:
            data, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        return msgspec.json.decode(data, type=_Known) if hmac.compare_digest(mac, _mac(data, key)) else {}
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return {}


def _remember(place: OpenFolder, name: str, known: _Known, key: TierKey | None) -> None:
    """Replace the file that caches digests, in one atomic step."""
    beside, data = f"{name}.{os.getpid()}", json.dumps(known).encode()
    with os.fdopen(place.make_file(beside), "wb") as file:
        file.write(data + _mac(data, key))
    place.rename(beside, name)


def _mac(data: bytes, key: TierKey | None) -> bytes:
    return b"" if key is None else key.mac(b"weights", data)
