"""Where the engine will write: the journal's file, and the collector of spans."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from kvoffload.checks.check import Check, Finding, Setup, go, no_go, not_known, warn
from kvoffload.checks.machine import Machine
from kvoffload.model.errors import ConfigError

_PATIENCE_S = 2.0
_SETTINGS = "the settings cannot be used"


def _journal(setup: Setup, _: Machine) -> Finding:
    if setup.config is None:
        return not_known(_SETTINGS)
    path = setup.config.journal_path
    if path is None:
        return go("no file: the last thousand events are kept in memory")
    problem = _try_journal(path)
    return (
        no_go(problem, "name a file in an existing folder of the engine's user") if problem else go(str(path))
    )


def _try_journal(path: Path) -> str:
    """Open the journal as an engine does, and leave everything as it was; return what is wrong, if anything."""
    from kvoffload.telemetry.journal_file import JournalFile

    mode = path.stat().st_mode if path.exists() else None
    try:
        JournalFile(path).close()
    except ConfigError as error:
        return str(error)
    if mode is None:
        path.unlink()
    else:
        os.chmod(path, mode & 0o7777)
    return ""


def _collector(setup: Setup, _: Machine) -> Finding:
    if setup.config is None:
        return not_known(_SETTINGS)
    endpoint = setup.config.otlp_endpoint
    if endpoint is None:
        return go("none: no spans are sent")
    from kvoffload.telemetry.spans import check_installed

    try:
        check_installed(setup.config)
    except ConfigError as error:
        return no_go(str(error), "pip install 'kvoffload[otel]'")
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), _PATIENCE_S).close()
    except OSError as error:
        return warn(
            f"nothing answers at {url.hostname}:{port} now ({error.strerror or error}): spans would be lost",
            "start the collector, or change otlp_endpoint",
        )
    return go(f"{url.hostname}:{port} answers")


CHECKS = (Check("journal", _journal), Check("span collector", _collector))
