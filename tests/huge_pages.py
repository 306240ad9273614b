"""A folder on a hugetlbfs for tests: root may mount one, and let the system make a few huge pages when they are asked for."""

from __future__ import annotations

import fcntl
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
def mounted() -> Iterator[Path]:
    """Yield an empty folder on a hugetlbfs, with 128 pages of 2 MiB. The test is skipped if this user may not have one."""
    with tempfile.TemporaryDirectory() as name:
        options = ["-t", "hugetlbfs", "-o", "pagesize=2M,mode=0700", "none", name]
        if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("only a user who may mount a hugetlbfs can test memory in huge pages")
        try:
            _allow(_PAGES)
            yield Path(name)
        finally:
            _allow(-_PAGES)
            # Lazily, because the memory of an engine that a test has left is unmapped when it is collected.
            subprocess.run(["umount", "--lazy", name], check=True)


def _allow(more: int) -> None:
    """Change how many huge pages the system may make beyond its pool. Other tests do the same at the same time."""
    with _MOST.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        allowed = int(file.read()) + more
        file.seek(0)
        file.write(str(allowed))
