"""Calls that must not fail: what a callback raises is logged and goes no further."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")
_log = logging.getLogger(__name__)


def call_guarded(callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `callback`; an exception of its own is logged, so that telling of one failure cannot cause the next."""
    try:
        callback(*args, **kwargs)
    except Exception:
        _log.exception("callback_failed")
