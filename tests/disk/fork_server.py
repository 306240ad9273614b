"""Processes that a test kills. A fork server that has already imported their modules starts them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return the context that starts such processes.

    A process has only one fork server, and its imports must be set before its first use, so all tests share
    this one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.disk.blocks", "tests.reference.test_disk_kills"])
    return context
