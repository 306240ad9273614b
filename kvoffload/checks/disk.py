"""The disk below the host: space, file system, direct I/O, its speed and what that is worth, and what lies in its folder."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, not_known, warn
from kvoffload.model.config import size_text

if TYPE_CHECKING:
    from kvoffload.checks.machine import Machine
    from kvoffload.model.config import OffloadConfig

_NONE = "none: no disk_path is set"
_SETTINGS = "the settings cannot be used"
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")
_PIECE, _PIECES, _THREADS = 2**20, 64, 4
_WORKERS_END_S = 5.0  # after which vLLM ends them, as it is
_DAY_S = 86400.0
_SHOWN = 3


def needed_bytes(config: OffloadConfig, setup: Setup) -> int | None:
    """Return the disk space of all replicas on this machine, None if unknown."""
    if config.disk_bytes_per_rank is None:
        return config.disk_bytes * setup.replicas
    return None if setup.ranks is None else config.disk_bytes_per_rank * setup.ranks * setup.replicas


def _space(setup: Setup, machine: Machine) -> Finding:
    config = setup.config
    if config is None or config.disk_path is None:
        return not_known(_SETTINGS) if config is None else go(_NONE)
    folder = _existing(config.disk_path)
    space = machine.space(str(folder))
    if space is None:
        return no_go(f"{folder} cannot be looked at", "name a folder of the engine's user in disk_path")
    needed = needed_bytes(config, setup)
    if needed is None:
        return not_known(
            f"how many ranks there are, of {size_text(config.disk_bytes_per_rank or 0)} each", "give --ranks"
        )
    ours = sum(size for _, size, _ in _folders(config.disk_path))
    words = f"{size_text(needed)} of {setup.replicas} {'engine' if setup.replicas == 1 else 'engines'}"
    free = f"the {size_text(space.free)} that {folder} has free"
    if needed > space.free + ours:
        return no_go(f"{words} are more than {free}", "lower disk_bytes, or free space")
    if needed > space.free:
        return warn(
            f"{words} fit {free} only if the {size_text(ours)} of earlier engines in it are theirs or are removed",
            "look at `disk leftovers`",
        )
    return go(f"{words} fit {free}")


def _file_system(setup: Setup, machine: Machine) -> Finding:
    path = _path_of(setup)
    if path is None:
        return go(_NONE)
    kind = _kind_of(_existing(path), machine)
    if kind is None:
        return not_known("the kind of the file system: /proc/self/mountinfo cannot be read")
    if kind in _IN_MEMORY:
        return warn(
            f"it is on {kind}, which is memory: nothing of it is left after a restart of the machine",
            "name a folder on a disk",
        )
    if kind.startswith(_NETWORKED):
        return warn(
            f"it is on {kind}, over a network: calls may hang, and requests would wait for them",
            "name a folder on a local disk",
        )
    return go(kind)


def _owners(setup: Setup, _: Machine) -> Finding:
    from kvoffload.disk.folder import caution

    path = _path_of(setup)
    if path is None:
        return go(_NONE)
    if note := caution(path):
        return warn(note, "name a folder that only the engine's user can write to")
    return go("no other user may rename or remove what is in it")


def _speed(setup: Setup, _: Machine) -> Finding:
    path = _path_of(setup)
    if path is None:
        return go(_NONE)
    folder = _existing(path)
    try:
        measured = measure(folder)
    except OSError as error:
        return no_go(
            f"{folder} cannot be written: {error.strerror}", "name a folder of the engine's user in disk_path"
        )
    wrote, read, latency_s, is_direct = measured
    text = (
        f"it writes {wrote / 1e6:,.0f} MB/s and reads {read / 1e6:,.0f} MB/s{_worth(setup, read, latency_s)}"
    )
    if not is_direct:
        return warn(
            f"{text}, through the page cache: the file system takes no direct I/O, so the disk's own speed is not known",
            "name a folder on a file system that takes O_DIRECT (ext4, XFS); overlay and some network ones do not",
        )
    return go(text)


def measure(folder: Path) -> tuple[float, float, float, bool]:
    """Write and read 64 MiB in a file without a name; return both in bytes a second, the time of one read, and if I/O was direct.

    Raises:
        OSError: the folder cannot be written.
    """
    from kvoffload.disk.slot_file import go_direct
    from kvoffload.disk.system import aligned_buffer

    with tempfile.TemporaryFile(dir=folder) as file, ThreadPoolExecutor(_THREADS) as threads:
        descriptor = file.fileno()
        buffers = [aligned_buffer(_PIECE) for _ in range(_THREADS)]
        os.posix_fallocate(descriptor, 0, _PIECE * _PIECES)
        is_direct = go_direct(descriptor, buffers[0]) is None

        def move(call: object, thread: int) -> None:
            for piece in range(thread, _PIECES, _THREADS):
                call(descriptor, [buffers[thread]], piece * _PIECE)  # type: ignore[operator]

        seconds = []
        for call in (os.pwritev, os.preadv):
            began = time.perf_counter()
            list(threads.map(move, [call] * _THREADS, range(_THREADS)))
            if call is os.pwritev:
                os.fdatasync(descriptor)
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        os.preadv(descriptor, [buffers[0]], 0)
        latency_s = time.perf_counter() - began
    size = _PIECE * _PIECES
    return size / seconds[0], size / seconds[1], latency_s, is_direct


def _worth(setup: Setup, read: float, latency_s: float) -> str:
    """Say what a fetch is worth: a token's bytes at this speed, against the time that an engine takes to prefill it."""
    if setup.block_bytes is None or setup.block_tokens is None:
        return ""
    token_s = setup.block_bytes * (setup.ranks or 1) / setup.block_tokens / read
    least = max(round(latency_s / token_s), 1)
    return (
        f": {1 / token_s:,.0f} tokens a second, so a fetch pays where the engine prefills fewer; where it prefills half as many, "
        f"from {least:,} tokens on"
    )


def _leftovers(setup: Setup, _: Machine) -> Finding:
    path = _path_of(setup)
    if path is None:
        return go(_NONE)
    found = sorted(_folders(path), key=lambda one: -one[1])
    if not found:
        return go("the folder holds nothing yet")
    total = sum(size for _, size, _ in found)
    now = time.time()
    shown = [
        f"{name} ({size_text(size)}, unused for {max(now - used, 0) / _DAY_S:.0f} days)"
        for name, size, used in found[:_SHOWN]
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    text = f"{len(found)} folders with {size_text(total)}: {', '.join(shown)}{more}; identity.json in each says of what"
    if len(found) == 1:
        return go(text)
    return warn(text, "remove those of models and settings that are not used any more: nothing else does")


def _drain(setup: Setup, _: Machine) -> Finding:
    config = setup.config
    if config is None or config.disk_path is None:
        return go(_NONE)
    if config.drain_s >= _WORKERS_END_S:
        return warn(
            f"drain_s is {config.drain_s:g}: an engine may end its workers {_WORKERS_END_S:g} s after it was asked to stop (vLLM "
            "does), and what was not written by then is lost",
            f"set drain_s below {_WORKERS_END_S:g}, or give the engine more time to stop",
        )
    return go(f"{config.drain_s:g} s, within the {_WORKERS_END_S:g} s that vLLM gives its workers to stop")


def _path_of(setup: Setup) -> Path | None:
    return setup.config.disk_path if setup.config is not None else None


def _existing(path: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next((one for one in (path, *path.absolute().parents) if one.is_dir()), Path("/"))


def _folders(path: Path) -> list[tuple[str, int, float]]:
    """Return name, bytes on disk and time of last change of what earlier engines left."""
    found = []
    for folder in path.iterdir() if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else ():
        if (folder / "identity.json").is_file():
            stats = [one.stat() for one in folder.rglob("*") if one.is_file()]
            size, used = sum(512 * one.st_blocks for one in stats), max(one.st_mtime for one in stats)
            found.append((folder.name[:12], size, used))
    return found


def _kind_of(path: Path, machine: Machine) -> str | None:
    """Return the type of the file system that a path is on: that of the longest mount point above it."""
    table = machine.read("/proc/self/mountinfo")
    best: tuple[int, str] | None = None
    for line in (table or "").splitlines():
        fields, _, rest = line.partition(" - ")
        mount = fields.split()[4].encode().decode("unicode_escape")
        if rest and (path.resolve() == Path(mount) or Path(mount) in path.resolve().parents):
            best = max(best or (-1, ""), (len(mount), rest.split()[0]), key=lambda one: one[0])
    return best[1] if best is not None else None


CHECKS = (
    Check("disk space", _space),
    Check("disk file system", _file_system),
    Check("disk owners", _owners),
    Check("disk speed", _speed),
    Check("disk leftovers", _leftovers),
    Check("disk drain", _drain),
)
"""Asked before a start only: they write a file without a name."""
