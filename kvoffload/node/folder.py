"""Finds and locks an engine's folder below `host_path`, lists the folders of other engines, and removes them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import OpenFolder, close_locked, lock, open_folder, open_root
from kvoffload.disk.system import PAGE
from kvoffload.logs import get_logger
from kvoffload.model.errors import ConfigError, DiskError
from kvoffload.node.file_systems import LARGER_TMPFS, check_pages, check_tmpfs, page_bytes, remove_memory
from kvoffload.node.processes import Process, may_run, this_process

_CLAIMS, _LOCK, _OWNER = "claims", "lock", "owner.json"
_DESCRIPTION = "identity.json"
# the files that engines make in their folders
_OURS = re.compile(r"lock|notes|(rank|sums)\d+|(owner\.json|identity\.json|table)(\.new)?")
_LONGEST_OWNER = 2**20
_TRIES, _PAUSE_S = 200, 0.05  # how often, and after which pause, a process tries to lock `claims`
_LAST_TRIES = 20  # the same for a process that ends: engines wait only a few seconds for their workers

log = get_logger("host")


class Owner(msgspec.Struct, frozen=True):
    """Who uses a folder.

    Args:
        engine: names one life of one engine.
        processes: the engine's processes.
        former: processes of earlier engines that had not ended, as far as the present engine could see.
    """

    engine: str
    processes: tuple[Process, ...] = ()
    former: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder that this process has locked for its engine, until the folder is closed.

    Args:
        folder: the folder.
        former: the processes of earlier engines that may still write to memory in this folder.
    """

    folder: OpenFolder
    former: tuple[Process, ...]

    def size(self, *, in_pages: bool) -> int:
        """Return how many bytes the folder's files have in a pool of huge pages, or else on the tmpfs."""
        return _bytes_in(self.folder.path)[in_pages]

    def close(self, *, may_still_write: bool = False) -> None:
        """Unlock the folder.

        Args:
            may_still_write: whether copies of this process may still write to memory in this folder.
        """
        if not may_still_write:
            with suppress(OSError, DiskError), open_folder(self.folder.path.parent) as kind:
                self._leave(kind)
        self.folder.close()

    def _leave(self, kind: OpenFolder) -> None:
        """Remove this process from the owner's list, in which an ended process does no harm."""
        with _choosing(kind, _LAST_TRIES):
            owner = _read_owner(self.folder)
            processes = [*owner.processes]
            with suppress(ValueError):
                processes.remove(this_process())  # once, because each claim added it once
            _write_owner(self.folder, msgspec.structs.replace(owner, processes=tuple(processes)))


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Determines the folder of an engine's host memory.

    Args:
        root: the setting `host_path`.
        kind: names engines of one kind. Each process of an engine must compute the same text before it knows the KV's
            identity, and so must later starts of the same engine.
        engine: names this life of the engine; the same text in all of its processes.
        identify: returns the identity of the engine's KV. It may wait for the engine's first step, and read all weights.
        pages: the setting `host_hugetlbfs`.
    """

    root: Path
    kind: str
    engine: str
    identify: Callable[[], KVIdentity]
    pages: Path | None = None

    @property
    def memory(self) -> Path:
        """Return the folder on the file system that has the ranks' memory."""
        return self.pages or self.root

    @property
    def page(self) -> int:
        """Return how many bytes a page of the ranks' files has."""
        return PAGE if self.pages is None else page_bytes(self.pages)

    def claim(self) -> Claim:
        """Lock the engine's folder. The first of its processes chooses: the fullest folder without an engine, or a new one.

        Raises:
            ConfigError: `host_path` is not on a tmpfs, or cannot be used, or `host_hugetlbfs` is not on a hugetlbfs.
        """
        check_tmpfs(self.root)
        if self.pages is not None:
            check_pages(self.pages)
        try:
            with open_root(self.root) as root, root.make(self.kind) as kind, _choosing(kind):
                return _joined(kind, self.engine) or _taken_over(kind, self.engine)
        except (OSError, DiskError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                reason = f"{reason}; remove what stopped engines keep (kvoffload host-memory {self.root} --orphans), or {LARGER_TMPFS}"
            raise ConfigError([f"host_path: {self.root / self.kind} cannot be used: {reason}"]) from error


# -- claims ----------------------------------------------------------------------------------------------------------


@contextmanager
def _choosing(kind: OpenFolder, tries: int = _TRIES) -> Iterator[None]:
    """Let one process at a time choose a folder of this kind.

    Raises:
        DiskError: another process has been choosing for too long, by default for ten seconds.
    """
    descriptor = kind.open(_CLAIMS, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(tries):
            with suppress(BlockingIOError):
                lock(descriptor)
                break
            time.sleep(_PAUSE_S)
        else:
            raise DiskError(f"another process has locked {kind.path / _CLAIMS} for {tries * _PAUSE_S:.0f} s")
        yield
    finally:
        close_locked(descriptor)


def _joined(kind: OpenFolder, engine: str) -> Claim | None:
    """Join the other processes of this engine in their folder; None if this process is the engine's first."""
    for name in _numbers(kind):
        folder = kind.make(str(name))
        with _closed_on_error(folder):
            owner = _read_owner(folder)
            if owner.engine == engine:
                processes = (*owner.processes, this_process())
                _write_owner(folder, msgspec.structs.replace(owner, processes=processes))
                folder.lock = _locked(folder, fcntl.LOCK_SH)
                return Claim(folder, owner.former)
        folder.close()
    return None


def _taken_over(kind: OpenFolder, engine: str) -> Claim:
    """Take the fullest folder without an engine, or make a new one."""
    numbers = _numbers(kind)
    by_size = sorted(numbers, key=lambda number: -sum(_bytes_in(kind.path / str(number))))
    new = max(numbers, default=-1) + 1
    for number in (*by_size, new):
        folder = kind.make(str(number))
        with suppress(BlockingIOError), _closed_on_error(folder):
            folder.lock = _locked(folder, fcntl.LOCK_EX)
            before = _read_owner(folder)
            former = (*before.processes, *[each for each in before.former if may_run(each)])
            _write_owner(folder, Owner(engine, (this_process(),), former))
            fcntl.flock(folder.lock, fcntl.LOCK_SH)
            return Claim(folder, former)
    raise DiskError(f"another process has locked {kind.path / str(new)}")


@contextmanager
def _closed_on_error(folder: OpenFolder) -> Iterator[None]:
    """Unlock and close a folder if an error ends the block, such as that of a full tmpfs."""
    try:
        yield
    except BaseException:
        folder.close()
        raise


def _locked(folder: OpenFolder, how: int) -> int:
    descriptor = folder.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        lock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _numbers(kind: OpenFolder) -> list[int]:
    return sorted(int(name) for name in os.listdir(kind.descriptor) if name.isascii() and name.isdigit())


def _read_owner(folder: OpenFolder) -> Owner:
    """Return who uses or used a folder. If its file cannot be read, an unknown process may still write there."""
    try:
        with os.fdopen(folder.open(_OWNER, os.O_RDONLY), "rb") as file:
            return msgspec.json.decode(file.read(_LONGEST_OWNER), type=Owner)
    except FileNotFoundError:
        return Owner("")
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return Owner("", (Process(0, 0, "unknown"),))


def describe(folder: OpenFolder, identity: KVIdentity) -> None:
    """Write what the KV in a claimed folder depends on, for people. If that fails, say so."""
    parts = {"fingerprint": identity.fingerprint, **identity.as_parts()}
    try:
        with os.fdopen(folder.make_file(f"{_DESCRIPTION}.new"), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(parts), indent=2))
        folder.rename(f"{_DESCRIPTION}.new", _DESCRIPTION)
    except OSError as error:
        log.warning("host_memory_not_described", folder=str(folder.path), reason=str(error))


def _write_owner(folder: OpenFolder, owner: Owner) -> None:
    new = f"{_OWNER}.new"
    with os.fdopen(folder.make_file(new), "wb") as file:
        file.write(msgspec.json.encode(owner))
    folder.rename(new, _OWNER)


# -- folders of other engines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine's folder below `host_path`.

    Args:
        path: the folder.
        on_tmpfs: bytes that its files take on the tmpfs.
        in_pages: bytes that its files take in a pool of huge pages.
        used_at: when a process of an engine last began or ended to use it, in seconds since 1970.
        owner: who uses or used it.
        is_orphan: whether no engine uses it.
    """

    path: Path
    on_tmpfs: int
    in_pages: int
    used_at: float
    owner: Owner
    is_orphan: bool

    @property
    def size(self) -> int:
        """Return how many bytes of memory its files take."""
        return self.on_tmpfs + self.in_pages

    def size_with(self, pages: Path | None) -> int:
        """Return how many bytes they take where an engine with this `host_hugetlbfs` has its ranks' memory."""
        return self.on_tmpfs if pages is None else self.in_pages


def list_kept(root: Path) -> list[Kept]:
    """Return all engines' folders below `host_path`, the least recently used first.

    What engines have not made, and what belongs to other users, is left out and left as it is.
    """
    found = list[Kept]()
    with suppress(OSError):
        for path in root.iterdir():
            if _is_kind(path):
                with _saying_if_left_out(path):
                    found += _kept_of(path)
    return sorted(found, key=lambda kept: kept.used_at)


def _kept_of(kind_path: Path) -> list[Kept]:
    found = list[Kept]()
    with open_folder(kind_path) as kind, _choosing(kind):
        for path in [kind_path / str(number) for number in _numbers(kind)]:
            if _is_engine(path):
                with _saying_if_left_out(path):
                    found.append(_kept(path))
    return found


@contextmanager
def _saying_if_left_out(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, DiskError) as error:
        log.warning("host_memory_not_listed", folder=str(path), reason=str(error))


def _is_kind(path: Path) -> bool:
    with suppress(PermissionError):
        return not path.is_symlink() and (path / _CLAIMS).is_file() and path.stat().st_uid == os.geteuid()
    return False


def _is_engine(path: Path) -> bool:
    return not path.is_symlink() and (path / _OWNER).is_file()


def _kept(path: Path) -> Kept:
    with open_folder(path) as folder:
        used_at = os.stat(_OWNER, dir_fd=folder.descriptor).st_mtime
        return Kept(path, *_bytes_in(path), used_at, _read_owner(folder), _is_free(folder))


def remove_kept(kept: Kept) -> bool:
    """Remove an orphan; return False if an engine uses it by now, or if it cannot be removed.

    Files that engines do not make stay, and the folder with them.
    """
    try:
        with open_root(kept.path.parent) as kind, _choosing(kind), open_folder(kept.path) as folder:
            folder.lock = _locked(folder, fcntl.LOCK_EX)
            _unlink(folder, os.listdir(folder.descriptor))
            kept.path.rmdir()
    except (BlockingIOError, FileNotFoundError):
        return False
    except (OSError, DiskError) as error:
        log.warning("host_memory_not_removed", folder=str(kept.path), reason=str(error))
        return False
    log.info("host_memory_removed", folder=str(kept.path), bytes=kept.size)
    return True


def remove_files(folder: OpenFolder) -> None:
    """Remove what an engine keeps in its folder. Memory stays until no process maps it."""
    _unlink(folder, {*os.listdir(folder.descriptor)} - {_LOCK, _OWNER})


def _unlink(folder: OpenFolder, names: Iterable[str]) -> None:
    for name in filter(_OURS.fullmatch, names):
        remove_memory(folder, name)


def make_room(place: HostPlace, fits: Callable[[int], bool]) -> None:
    """Remove orphans while this engine's memory does not fit: those of other kinds first, then the least recently used.

    None is removed if its memory would not even fit without all of them, because this start will be refused.

    Args:
        place: this engine's place, which it has claimed.
        fits: returns whether its memory would fit if this many more bytes were free.
    """
    orphans = [kept for kept in list_kept(place.root) if kept.is_orphan and kept.size_with(place.pages)]
    if not fits(sum(kept.size_with(place.pages) for kept in orphans)):
        return
    for kept in sorted(orphans, key=lambda kept: kept.path.parent.name == place.kind):
        if fits(0):
            return
        remove_kept(kept)


def bound_orphans(root: Path, allowed: int) -> None:
    """Remove orphans, the least recently used first, until the rest takes at most `allowed` bytes together."""
    orphans = [kept for kept in list_kept(root) if kept.is_orphan]
    taken = sum(kept.size for kept in orphans)
    for kept in orphans:
        if taken <= allowed:
            return
        taken -= kept.size * remove_kept(kept)


def _is_free(folder: OpenFolder) -> bool:
    try:
        close_locked(_locked(folder, fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    return True


def _bytes_in(path: Path) -> tuple[int, int]:
    """Return how many bytes a folder's files take on the tmpfs, and how many in a pool of huge pages, to which links lead.

    The pool sets aside all pages of a file when it is mapped, and keeps them if the process ends before it uses them.
    """
    on_tmpfs = in_pages = 0
    with suppress(OSError):
        for each in path.iterdir():
            with suppress(OSError):
                found = each.stat()
                if each.is_symlink():
                    in_pages += found.st_size
                else:
                    on_tmpfs += 512 * found.st_blocks
    return on_tmpfs, in_pages
