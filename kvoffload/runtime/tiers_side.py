"""The lower tiers on the scheduler's side: the tiers' catalogs, and the steps of an idle engine for these tiers.

    step ─▶ facts for the core: blocks in the index, the remote tier's answers, overdue jobs ─▶ records for the index
    report ─▶ newly opened slot files, records for the index
    last request ended ─▶ steps for spills and a warm start, for at most `disk_drain_s`

Engines do not announce a shutdown: they end their requests, keep stepping while anything has work, and stop. So an
engine without requests keeps stepping for up to `disk_drain_s`: after its start to read the disk's index, and before it
stops to spill blocks.

Hooks check the public attributes before they call a method, which saves most calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from math import inf
from typing import Protocol, TypeVar

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.tiers import Ask
from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import RemoteFault
from kvoffload.model.config import OffloadConfig
from kvoffload.model.wire import DiskRecord, TransferReport
from kvoffload.remote.address import RemotePlace
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.remote_catalog import RemoteCatalog
from kvoffload.transfer.ports import Clocks

Answer = TypeVar("Answer")

log = get_logger("tiers")

_PATIENCE = 10
"""Open jobs are overdue if no job begins or ends for this many times `transfer_timeout_s`.

Workers report a call that hangs much earlier, after its own time limit.
"""

_POLL_S = 0.02
"""Seconds between two polls of the remote tier while no call has ended.

These polls only find calls that take too long.
"""

OPENING_S = 60.0
_LONGEST_STEP_S = 1.0
"""A longer pause between steps counts as this many seconds, because tiers only open while the engine steps."""

_LATE_STEPS = 4
"""After a pause, jobs are not overdue for this many steps. Engines that schedule ahead report ended jobs late."""


class AsksCore(Protocol):
    """Calls the core and handles the core's exceptions."""

    def ask(self, name: str, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Call `question` and return its result, or `otherwise` if the core raises now or has raised before."""


class TiersSide:
    """The part of `SchedulerSide` and of `TierCache` for the tiers below the host.

    Args:
        core: the core, with a disk, a remote tier or both.
        faults: calls the core and handles the core's exceptions.
        config: the operator's settings.
        portal: provides threads that may wait for a tier.
        clocks: the clocks to read.
        disk: the location of the disk's files; None without a disk.
        remote: the address of the remote tier, and a function that identifies this engine's KV; None without a remote
            tier.
        key: authenticates the contents of both tiers; None if all writers of these tiers are trusted.

    Attributes:
        due: functions that return facts about the disk's index. While there are any, each step calls `take_facts`.
        ended: ended calls to the remote tier. While there are any, each step calls `take_facts`.
        polls_at: the time at which a step calls `take_facts` even if no call has ended.
        asks: the core's queries for the remote tier.
        records: the core's records for the disk's index.
        overdue_at: when the open jobs become overdue, unless a job begins or ends before.
        remote_faults: for each kind of failure, how many calls of the scheduler's side to the remote tier have failed.
        awaits_files: True while a rank's report about its slot file is missing.
        is_opening: True until all tiers are open, or until the log has a warning about a tier that opens slowly.
    """

    def __init__(
        self,
        core: OffloadCore,
        faults: AsksCore,
        config: OffloadConfig,
        portal: Portal,
        clocks: Clocks,
        disk: DiskPlace | None,
        remote: RemotePlace | None,
        key: TierKey | None,
    ) -> None:
        state, now = core.state, clocks.monotonic
        ranks = state.shape.ranks
        self.disk: DiskCatalog | None = None
        self._remote: RemoteCatalog | None = None
        self._catalogs: dict[str, DiskCatalog | RemoteCatalog] = {}
        if disk is not None:
            self.disk = DiskCatalog(
                disk, ranks, portal, clocks.sleep, closes_in_s=config.disk_drain_s, key=key
            )
            self._catalogs["disk"] = self.disk
        if remote is not None:
            self._remote = RemoteCatalog(remote, ranks, portal, now, config.remote_timeout_s, key)
            self._catalogs["remote"] = self._remote
        self._tiers = core.lower_tiers
        self._state = state
        self._jobs = state.jobs
        self._faults = faults
        self._now = now
        self._patience_s = _PATIENCE * config.transfer_timeout_s
        self._drain_s = config.disk_drain_s
        self._idle_since: float | None = None
        self._late_steps = 0
        self.due: Sized = () if self.disk is None else self.disk.due
        self.remote_faults: dict[RemoteFault, int] = {} if self._remote is None else self._remote.faults
        self.ended: Sized = () if self._remote is None else self._remote.ended
        self.polls_at = inf if remote is None else -inf
        self.asks: list[Ask] = [] if state.remote is None else state.remote.asks
        self.records: list[DiskRecord] = [] if state.disk is None else state.disk.records
        self.overdue_at = inf
        self.awaits_files = disk is not None
        self.is_opening = True
        self._opening_s = 0.0
        self._stepped_at = -inf

    def ask(self) -> None:
        """Send the core's queries to the remote tier."""
        if self._remote is not None and self._state.remote is not None:
            for request, keys in self._faults.ask("seen", self._state.remote.take_asks, list[Ask]()):
                self._remote.ask(request, keys)

    def take_facts(self, now: float) -> list[facts.Fact]:
        """Return new facts for the core. At `overdue_at`, report all open jobs as overdue (R16)."""
        found = list[facts.Fact]()
        if self.is_opening:
            self._look_at_opening(now)
        if self.overdue_at <= now and self._late_steps:
            self._late_steps -= 1
        elif self.overdue_at <= now:
            self.overdue_at = inf
            found += map(facts.JobOverdue, self._jobs.on_tiers())
        for catalog in self._catalogs.values():
            found += catalog.take_facts()
        if self._remote is not None:
            self.polls_at = now + _POLL_S if self._remote.opening is None else -inf
        return found

    def _look_at_opening(self, now: float) -> None:
        """Log a warning, once, if a tier is not open after the engine has been stepping for a minute."""
        self._opening_s += min(now - self._stepped_at, _LONGEST_STEP_S)
        self._stepped_at = now
        stages = {name: catalog.opening for name, catalog in self._catalogs.items() if catalog.opening}
        self.is_opening = bool(stages) and self._opening_s < OPENING_S
        if not self.is_opening:
            for name, stage in stages.items():
                note = "the engine continues without the tier until it is open"
                log.warning("tier_still_opening", tier=name, stage=stage, after_s=OPENING_S, note=note)

    def moved(self, now: float) -> None:
        """Restart the time limit of open jobs, because one of them began or ended."""
        self.overdue_at = now + self._patience_s

    def reported(self, reports: Sequence[TransferReport], now: float, *, has_moved: bool) -> None:
        """Process the ranks' reports; `has_moved` is True if a job on these tiers has ended."""
        if has_moved:
            self.moved(now)
        if self.disk is not None and self.awaits_files:
            self.awaits_files = self.disk.ranks_reported(reports)
        if self.records:
            self.record()

    def record(self) -> None:
        """Pass the core's records to the disk's index."""
        if self.disk is not None and self._state.disk is not None:
            records = self._faults.ask("disk", self._state.disk.take_records, list[DiskRecord]())
            if records:
                self.disk.append(records)

    def rest(self, now: float) -> None:
        """Record when the last request ended."""
        self._idle_since = now

    @property
    def has_work(self) -> bool:
        """Return whether an engine without requests must keep stepping for these tiers, at most for `disk_drain_s`."""
        is_opening = self.disk is not None and self.disk.is_opening
        is_busy = is_opening or self._jobs.pending
        if not (is_busy or self._faults.ask("has_work", lambda: self._tiers.is_due, False)):
            return False
        now = self._now()
        if self._idle_since is None:  # the engine has just started
            self._idle_since = now
        if now - self._idle_since < self._drain_s:
            return True
        self._late_steps = _LATE_STEPS
        return False

    def reset(self) -> bool:
        """Discard all blocks on these tiers; return True if later processes cannot find these blocks either."""
        if self._remote is not None:
            self.polls_at = -inf
        # A list instead of a generator: every catalog must be reset, even if the first reset is incomplete.
        are_done = [catalog.reset() for catalog in self._catalogs.values()]
        return all(are_done)

    def close(self) -> None:
        """Write pending records and close the tiers. If a disk hangs, return after `disk_drain_s`."""
        self.record()
        for catalog in self._catalogs.values():
            catalog.close()
