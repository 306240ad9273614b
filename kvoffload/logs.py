"""Structured logs: one name per fact, stable keys, through the standard library's logging.

A library does not set logging up, its host does. So every logger here ends in `logging.getLogger("kvoffload...")`, no
handler is installed, and structlog's own global configuration is left alone: the host may use it too. Keys are in the
line's text for hosts that only print text, and on the record (`record.kvoffload`) for formatters that know them.
Only the command, which is its own host, calls `configure`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import IO, TYPE_CHECKING, Any, cast

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

ROOT = "kvoffload"
_STACK_LEVEL = 4  # frames of structlog between a caller and the standard logger: hosts print file and line


def get_logger(name: str = "", under: str | None = None) -> structlog.stdlib.BoundLogger:
    """Return the logger `kvoffload.<name>`.

    Args:
        name: the part of kvoffload.
        under: the host's own logger whose handlers and level it should use; by default the root's.
    """
    full = ".".join(part for part in (under, ROOT, name) if part)
    logger = structlog.wrap_logger(
        logging.getLogger(full),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def configure(
    stream: IO[str] | None = None, *, as_json: bool | None = None, level: int = logging.INFO
) -> None:
    """Print kvoffload's logs to `stream`; for a process that is ours. Calling it again replaces the last call.

    Args:
        stream: where; standard error by default.
        as_json: one object a line; by default where the stream is no terminal.
        level: the least level printed.
    """
    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty()
    colors = terminal and not os.environ.get("NO_COLOR")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(as_json=not terminal if as_json is None else as_json, colors=colors))
    root = logging.getLogger(ROOT)
    for old in [one for one in root.handlers if isinstance(one.formatter, _Formatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


class _Formatter(logging.Formatter):
    """A line for people or an object for machines, with the same keys."""

    def __init__(self, *, as_json: bool, colors: bool) -> None:
        super().__init__()
        self._timestamp = structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json)
        self._renderer: Any = (
            structlog.processors.JSONRenderer(default=str)
            if as_json
            else structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=24)
        )

    def format(self, record: logging.LogRecord) -> str:
        keys = getattr(record, "kvoffload", None) or {"event": record.getMessage()}
        if record.exc_info and "exception" not in keys:
            keys = {**keys, "exception": self.formatException(record.exc_info)}
        line = {**keys, "level": record.levelname.lower(), "logger": record.name}
        return str(self._renderer(None, record.levelname, self._timestamp(None, record.levelname, line)))


def _to_record(
    _logger: object, _method: str, keys: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Turn an event into the arguments of a standard logger's call."""
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
