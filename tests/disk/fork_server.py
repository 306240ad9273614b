"""Processes that a test kills, forked from a process that has already imported their modules."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return the context that makes such processes.

    A process has one fork server, whose imports are set before its first use, so all tests use the same.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.disk.blocks", "tests.reference.test_disk_kills"])
    return context
