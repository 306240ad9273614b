"""Structured logs through the standard library's logging. Each line has one event name and stable keys.

The application configures logging; a library must not. So every logger here is a `logging.getLogger("kvoffload...")`
without handlers, and structlog's global configuration, which the application may use, is not changed. The keys are in
the text of the line, for applications that only print text, and in `record.kvoffload`, for formatters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

ROOT = "kvoffload"
# Skip this many frames, which are structlog's, so that log records name the caller's file and line.
_STACK_LEVEL = 4


def get_logger(name: str = "", under: str | None = None) -> structlog.stdlib.BoundLogger:
    """Return the logger `kvoffload.<name>`.

    Args:
        name: the part of kvoffload that logs, such as "worker".
        under: the name of the application's logger whose handlers and level apply; by default the root logger.
    """
    full = ".".join(part for part in (under, ROOT, name) if part)
    logger = structlog.wrap_logger(
        logging.getLogger(full),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def _to_record(
    _logger: object, _method: str, keys: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Return the positional and keyword arguments for a method of the standard logger."""
    return (_as_text(keys),), {"extra": {"kvoffload": dict(keys)}, "stacklevel": _STACK_LEVEL}


def _as_text(keys: Mapping[str, Any]) -> str:
    exception = keys.get("exception")
    pairs = [f"{key}={_quote(value)}" for key, value in keys.items() if key not in ("event", "exception")]
    line = " ".join([str(keys.get("event", "")), *pairs])
    return f"{line}\n{exception}" if exception else line


def _quote(value: object) -> str:
    text = str(value)
    return (
        repr(text)
        if not text or any(character.isspace() or character in "='\"" for character in text)
        else text
    )
