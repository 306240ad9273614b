"""The identity of a model's weights: a snapshot's commit, or a digest of all bytes of its folder.

A digest takes as long as reading the weights, so it is computed on a separate thread. Digests are remembered
by inode, size and time of change (ctime); no program can set a ctime. A file that changed less than two seconds
ago could change again without a new ctime, so its digest is not remembered.
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
_MOST_MEMORY = 2**24  # the maximum number of bytes read from the file of remembered digests
_MAC_BYTES = 32  # length of the MAC at the end of that file, if there is a key
_SETTLED_NS = 2 * 10**9  # longer than one tick of any file system's clock

_Known = dict[str, tuple[int, int, str]]


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a snapshot in a Hugging Face cache; None for any other folder.

    The files of a snapshot are links to blobs that are named by their content. If a file has replaced one of
    these links, the commit no longer describes the folder, so the answer is None.
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
    """Return the identity of a model's weights. This may read all of their bytes.

    Args:
        folder: the model's folder.
        memory: the file of remembered digests.
        key: authenticates that file, because with a forged digest the engine would use the KV of other weights. None if
            all writers are trusted.
        loaded_ns: a time before the engine began to load the weights, in nanoseconds since 1970. A file that changed
            after this time may differ from the loaded one. None allows changes at any time.
        now_ns: returns nanoseconds since 1970, on the file system's clock.

    Raises:
        DiskError: another user owns the file of remembered digests; or the weights cannot be read, change while
            they are read, or changed after `loaded_ns`.
    """
    if (commit := snapshot_commit(folder)) is not None:
        return f"commit {commit}"
    try:
        place = open_root(memory.parent)
    except OSError:  # Without remembered digests, the next start only takes longer.
        return _digest_of(folder, _Reader({}, loaded_ns, now_ns))
    with place:
        reader = _Reader(_recall(place, memory.name, key), loaded_ns, now_ns)
        digest = _digest_of(folder, reader)
        with suppress(OSError):  # Without remembered digests, the next start only takes longer.
            _remember(place, memory.name, reader.known, key)
    return digest


def process_began_ns() -> int:
    """Return when this process began, in nanoseconds since 1970: an engine loaded its weights after that time."""
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
    """Yield all files of a model except hidden ones: weights, settings and code all change its results."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


@dataclass(slots=True)
class _Reader:
    """Returns digests of files, computing those that are not known.

    Args:
        known: size, time of change and digest of each file, by device and inode; new digests are added.
        loaded_ns: no file may have changed after this time; None allows any time.
        now_ns: returns nanoseconds since 1970.
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
            # Reading stops at the size found above, because a growing file may never end.
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
    """Return the remembered digests by device and inode; none if their file cannot be read or is not authentic."""
    try:
        with os.fdopen(place.open(name, os.O_RDONLY), "rb") as file:
            data, mac = file.read(_MOST_MEMORY), b""
        if key is not None:
            data, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        return msgspec.json.decode(data, type=_Known) if hmac.compare_digest(mac, _mac(data, key)) else {}
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return {}


def _remember(place: OpenFolder, name: str, known: _Known, key: TierKey | None) -> None:
    """Replace the file of remembered digests atomically."""
    beside, data = f"{name}.{os.getpid()}", json.dumps(known).encode()
    with os.fdopen(place.make_file(beside), "wb") as file:
        file.write(data + _mac(data, key))
    place.rename(beside, name)


def _mac(data: bytes, key: TierKey | None) -> bytes:
    return b"" if key is None else key.mac(b"weights", data)
