"""What happens when offloading goes off (R12): it is said once, with the journal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvoffload.bus.bus import Bus
from kvoffload.logs import get_logger
from kvoffload.model.causes import DegradeCause
from kvoffload.model.errors import KVOffloadError
from kvoffload.model.events import OffloadingDegraded
from kvoffload.runtime.portal import Portal
from kvoffload.telemetry.journal import Journal
from kvoffload.telemetry.journal_file import JournalFile

log = get_logger("scheduler")

_TAIL = 20  # lines of the journal that the log carries
_RING = 1 << 20  # lines of it that the file takes: all there are


class Degradation:
    """Follows the one event that switches offloading off.

    With a `journal_path` all of the journal's ring goes to a file beside it, named as it is with `.degraded` behind,
    which only its owner can read. It is written on a thread of the portal's: the engine waits for no disk. Without one the log
    has the last lines.

    Args:
        journal: what led to it.
        path: the journal's own file, None without one.
    """

    def __init__(self, journal: Journal, path: Path | None) -> None:
        self._journal = journal
        self._ring_path = path.with_name(f"{path.name}.degraded") if path is not None else None
        self.cause: DegradeCause | None = None
        """Why offloading is off, None while it is on."""
        self._portal: Portal | None = None
        self._bus = Bus()

    def subscribe(self, bus: Bus, portal: Portal | None) -> None:
        """Follow it from now on; files are written on the portal's threads where there are any."""
        self._portal = portal
        self._bus = bus
        bus.count(OffloadingDegraded, self._degraded)

    def _degraded(self, event: OffloadingDegraded) -> None:
        self.cause = event.cause
        self._bus.afterwards(partial(self._report, event))  # when the journal has what led to it

    def _report(self, event: OffloadingDegraded) -> None:
        whole = {"journal_file": str(self._ring_path)} if self._ring_path is not None else {}
        last = self._journal.tail(_TAIL)
        log.error("offloading_off", cause=event.cause.value, detail=event.detail, journal=last, **whole)
        if self._ring_path is not None:
            self._save(self._ring_path)

    def _save(self, path: Path) -> None:
        try:
            if self._portal is not None:
                self._portal.executor.submit(self._write, path)
                return
        except (KVOffloadError, RuntimeError):  # the portal was closed: the engine has stopped, and can wait
            pass
        self._write(path)

    def _write(self, path: Path) -> None:
        try:
            file = JournalFile(path)
            try:
                head = self._journal.head(0)
                file.append("".join(f"{line}\n" for line in self._journal.tail(_RING)), head)
            finally:
                file.close()
        except (KVOffloadError, OSError) as error:
            log.error(
                "journal_not_saved", path=str(path), error=str(error), note="the log has its last lines"
            )
