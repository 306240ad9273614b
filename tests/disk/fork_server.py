"""Processes that a test kills, forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return where such processes are made.

    A process has one fork server, which imports what was named before its first use, so all tests name the same.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.disk.blocks", "tests.reference.test_disk_kills"])
    return context
