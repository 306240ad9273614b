"""Counting takes no threads."""

from tests.reference.conftest import _one_thread

__all__ = ["_one_thread"]
