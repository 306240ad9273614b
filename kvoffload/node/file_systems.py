"""The file systems that have host memory: a tmpfs has all files of `host_path`, or a hugetlbfs has the ranks' memory.

A hugetlbfs accepts no write(2), no symbolic links and only sizes of whole huge pages. So a rank's file is there under a
random name, and a link in the engine's folder on the tmpfs leads to it:

    host_path/<kind>/0/rank0  ─▶  host_hugetlbfs/<folder>-<random>

The name has the numbers of that folder, so that a link in a copy of the folder, which leads to the same memory, counts as none.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.disk.open_folder import open_file
from kvoffload.model.config import size_text
from kvoffload.model.errors import ConfigError

if TYPE_CHECKING:
    from kvoffload.disk.open_folder import OpenFolder

LARGER_TMPFS = (
    "make it larger (Docker: --shm-size; Kubernetes: the memory volume's sizeLimit; else: mount -o remount,size=...), or lower "
    "host_bytes"
)
LARGER_POOL = "make it larger (sysctl vm.nr_hugepages=...), or lower host_bytes"
"""What to do if the memory does not fit."""

LARGEST_PAGE = 2 * 2**20
"""The bytes of a huge page. Of larger ones, each chunk would waste most."""

_TMPFS, _HUGETLBFS = "tmpfs", "hugetlbfs"
_RANDOM = "[0-9a-f]{32}"


def file_system_of(path: Path) -> str | None:
    """Return the kind of file system that has `path`, or the nearest folder above that exists; None if it is not known."""
    for each in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            number = each.stat().st_dev
            break
    else:
        return None
    device = f"{os.major(number)}:{os.minor(number)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == device:
                return rest.split()[0]
    return None


def check_tmpfs(root: Path) -> None:
    """Check that files of host memory may lie below `root`, which need not exist yet.

    Raises:
        ConfigError: `root` is not on a tmpfs.
    """
    found = file_system_of(root)
    if found is not None and found != _TMPFS:
        instead = "name it in host_hugetlbfs, and " if found == _HUGETLBFS else ""
        problem = (
            f"host_path: {root} is on {found}; it must be on {_TMPFS}, because host memory is in its files: {instead}name a "
            "folder below /dev/shm, or mount one"
        )
        raise ConfigError([problem])


def check_pages(folder: Path) -> None:
    """Check that a folder can have the ranks' memory in huge pages.

    Raises:
        ConfigError: it is missing, not on a hugetlbfs, not writable, or its pages are too large.
    """
    try:
        page = page_bytes(folder)
    except OSError as error:
        raise ConfigError([f"host_hugetlbfs: {folder} cannot be used: {error.strerror}"]) from error
    found = file_system_of(folder)
    if found is not None and found != _HUGETLBFS:
        raise ConfigError(
            [f"host_hugetlbfs: {folder} is on {found}; it must be on {_HUGETLBFS}, such as /dev/hugepages"]
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError([f"host_hugetlbfs: {folder} is not a folder in which this user can make files"])
    if page > LARGEST_PAGE:
        problem = (
            f"host_hugetlbfs: {folder} has pages of {size_text(page)}; they may have at most {size_text(LARGEST_PAGE)}: mount it "
            "with pagesize=2M"
        )
        raise ConfigError([problem])


def page_bytes(folder: Path) -> int:
    """Return how many bytes a page of the file system of `folder` has.

    Raises:
        OSError: the folder is missing.
    """
    return os.statvfs(folder).f_bsize


def free_bytes(root: Path) -> int:
    """Return how many bytes the file system of `root` has left. A hugetlbfs has those of the system's pool of pages."""
    found = os.statvfs(root)
    left = found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # there may be no limit
    return min(left, _pool_bytes(found.f_bsize)) if file_system_of(root) == _HUGETLBFS else left


def room_text(left: int) -> str:
    """Return what `free_bytes` returned, as text that follows "has"."""
    return "no limit" if left == sys.maxsize else f"{size_text(left)} left"


def _pool_bytes(page: int) -> int:
    """Return how many bytes the system's pool of huge pages of this size has left; without limit if it does not say."""
    pool = Path(f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB")
    try:
        free, reserved, most, extra = [
            int((pool / name).read_text())
            for name in ("free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
        ]
    except (OSError, ValueError):
        return sys.maxsize
    return (free - reserved + max(most - extra, 0)) * page


def check_free(root: Path, pages: Path | None, needed: int) -> None:
    """Check that the file system that has the ranks' memory has room.

    Args:
        root: the setting `host_path`.
        pages: the setting `host_hugetlbfs`.
        needed: bytes of memory.

    Raises:
        ConfigError: `needed` bytes do not fit.
    """
    if needed <= (left := free_bytes(pages or root)):
        return
    where, remedy = f"host_hugetlbfs: the pool of {pages}", LARGER_POOL
    if pages is None:
        where, remedy = f"host_path: the tmpfs of {root}", LARGER_TMPFS
    problem = f"{where} has {size_text(left)} left, and host_bytes needs {size_text(needed)} more: {remedy}"
    raise ConfigError([problem])


# -- the files of ranks ------------------------------------------------------------------------------------------------


def open_memory_file(folder: OpenFolder, name: str, flags: int) -> int:
    """Open a rank's file, in the engine's folder or where its link leads.

    Raises:
        DiskError: the file is not a plain file of this user, or a link to another folder's memory.
        OSError: the file is missing or cannot be opened.
    """
    target = _target(folder, name)
    return folder.open(name, flags) if target is None else open_file(target, flags)


def place_memory_file(folder: OpenFolder, name: str, pages: Path | None) -> bool:
    """Decide where a rank's file is, if it is missing; return whether one was elsewhere, and is removed.

    Args:
        folder: the engine's folder.
        name: the file's name.
        pages: the folder on a hugetlbfs; None for the engine's folder.
    """
    target = _target(folder, name)
    pages = pages and pages.absolute()  # a link's relative path would begin in the engine's folder
    is_here = _link(folder, name) is None if pages is None else target is not None and target.parent == pages
    is_elsewhere = not is_here and name in os.listdir(folder.descriptor)
    if is_elsewhere:
        remove_memory(folder, name)
    if pages is not None and not is_here:
        os.symlink(pages / (_prefix(folder) + secrets.token_hex(16)), name, dir_fd=folder.descriptor)
    return is_elsewhere


def remove_memory(folder: OpenFolder, name: str) -> None:
    """Remove a file of an engine's folder if it exists, and the memory to which it leads."""
    target = _target(folder, name)
    if target is not None:
        target.unlink(missing_ok=True)
    folder.unlink(name)


def _target(folder: OpenFolder, name: str) -> Path | None:
    """Return which memory of this folder a link leads to; None for a file, a missing name and the link of another folder."""
    link = _link(folder, name)
    is_ours = link is not None and re.fullmatch(_prefix(folder) + _RANDOM, link.name)
    return link if is_ours else None


def _prefix(folder: OpenFolder) -> str:
    """Return how the names of a folder's memory begin. A copy of the folder has another number, a renamed folder has not."""
    found = os.fstat(folder.descriptor)
    return f"{found.st_dev:x}-{found.st_ino:x}-"


def _link(folder: OpenFolder, name: str) -> Path | None:
    with suppress(OSError):
        return Path(os.readlink(name, dir_fd=folder.descriptor))
    return None
