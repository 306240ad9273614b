"""kvoffload's storage backend with time limits for which no machine is too slow, for tests that expect every page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvoffload_sglang.storage import KVOffloadStorage

PATIENCE_S = 60


class PatientStorage(KVOffloadStorage):
    def on_host_pools_registered(self) -> None:
        super().on_host_pools_registered()
        for cache in self._caches.values():
            for name in ("exists", "get", "put"):
                setattr(cache, name, partial(_patiently, getattr(cache, name)))


def _patiently(call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call with another time limit, its last argument."""
    *others, _ = arguments
    return call(*others, PATIENCE_S)
