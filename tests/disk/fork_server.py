"""Starts processes that a test kills, from a fork server that has imported their modules in advance."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return the context that starts processes from the fork server.

    There is one fork server per process, and its imports must be set before its first use.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.reference.test_kills"])
    return context
