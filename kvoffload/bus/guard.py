"""Callbacks whose exceptions are logged instead of raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")
_log = logging.getLogger(__name__)


def call_guarded(callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `callback`, and log an exception instead of raising it."""
    try:
        callback(*args, **kwargs)
    except Exception:
        _log.exception("callback_failed")
