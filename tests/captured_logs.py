from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvoffload.logs import ROOT


class _Collector(logging.Handler):
    def __init__(self, lines: list[dict[str, Any]]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append({**getattr(record, "kvoffload", {}), "log_level": record.levelname.lower()})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Collect the lines logged in the `with` block instead of printing them.

    Each line is a dict, which includes the keys `event` and `log_level`.
    """
    logger, lines = logging.getLogger(ROOT), list[dict[str, Any]]()
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers = [_Collector(lines)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.handlers = before[0]
        logger.propagate = before[2]
        logger.setLevel(before[1])
