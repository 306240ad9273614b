"""Folders on file systems that root mounts for a test: a hugetlbfs, and a tmpfs with options."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOST = Path("/proc/sys/vm/nr_overcommit_hugepages")
_PAGES = 128


@contextmanager
def mounted(kind: str, options: str) -> Iterator[Path]:
    """Yield an empty folder on a file system of its own. The test is skipped if this user may not mount one."""
    with tempfile.TemporaryDirectory() as name:
        words = ["mount", "-t", kind, "-o", f"{options},mode=0700", "none", name]
        if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
            pytest.skip(f"this user may not mount a {kind} with {options}")
        try:
            yield Path(name)
        finally:
            # Lazily, because the memory of an engine that a test has left is unmapped when it is collected.
            subprocess.run(["umount", "--lazy", name], check=True)


@contextmanager
def page_pool() -> Iterator[Path]:
    """Yield an empty folder on a hugetlbfs with room for 128 pages of 2 MiB.

    The system may make four times as many when they are asked for, because memory of other tests takes some until it is
    collected.
    """
    with mounted("hugetlbfs", f"pagesize=2M,size={2 * _PAGES}M") as folder:
        try:
            _allow(4 * _PAGES)
            yield folder
        finally:
            gc.collect()
            _allow(-4 * _PAGES)


def _allow(more: int) -> None:
    """Change how many huge pages the system may make beyond its pool. Other tests do the same at the same time."""
    with _MOST.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        allowed = int(file.read()) + more
        file.seek(0)
        file.write(str(allowed))
