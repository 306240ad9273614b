"""The tiers below the host on the scheduler's side: their catalogs, and the steps that an idle engine makes for them.

    step ─▶ facts for the core: blocks of the index, the remote tier's answers, overdue jobs ─▶ records for the index
    report ─▶ slot files that were opened, records
    last request ended ─▶ steps for spills and a warm start, for `disk_drain_s` at most

Engines do not announce a shutdown: they end their requests, step while anything has work, and stop. So a shutdown spills what
it can within `disk_drain_s`. In the same time an engine that just started reads the disk's index before its first request.

Hooks read the attributes before they call a method.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from math import inf

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.tiers import Ask
from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.config import OffloadConfig
from kvoffload.model.wire import DiskRecord, TransferReport
from kvoffload.remote.address import RemotePlace
from kvoffload.runtime.copies import Clocks
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.faults import Faults
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.remote_catalog import RemoteCatalog

log = get_logger("tiers")

_PATIENCE = 10
"""Times `transfer_timeout_s`, within which some job must begin or end. Workers end hanging calls after one."""

_POLL_S = 0.02
"""Seconds between two polls of the remote tier while no call has ended: they only find calls that take too long."""

OPENING_S = 60.0
_LONGEST_STEP_S = 1.0
"""A longer pause counts as this: an engine without requests makes no steps, and no tier opens meanwhile."""

_LATE_STEPS = 4
"""Steps after a pause in which the ends of jobs are reported, also where an engine schedules ahead of reports."""


class TiersSide:
    """What `SchedulerSide` knows of the tiers below the host.

    Args:
        core: the core, which has such tiers.
        faults: asks a core that may raise.
        config: the operator's settings.
        portal: gives threads that may wait for a tier.
        clocks: where time comes from.
        disk: where the disk's files belong, None without a disk.
        remote: where blocks belong in the remote tier, None without one.
        key: authenticates the contents of both; None where their writers are trusted.

    Attributes:
        due: parts of the disk's index for the core.
        ended: the remote tier's calls that have ended; the next step asks for facts.
        polls_at: when a step asks for facts although no call has ended.
        asks: questions for the remote tier.
        records: for the disk's index.
        overdue_at: when the open jobs are overdue, if none begins or ends before.
        awaits_files: whether ranks have not opened their slot files yet.
        is_opening: whether a step must check on a tier that opens; False after the warning that one takes long.
    """

    def __init__(
        self,
        core: OffloadCore,
        faults: Faults,
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
        self._core = state
        self._jobs = state.jobs
        self._faults = faults
        self._now = now
        self._patience_s = _PATIENCE * config.transfer_timeout_s
        self._drain_s = config.disk_drain_s
        self._idle_since: float | None = None
        self._late_steps = 0
        self.due: Sized = () if self.disk is None else self.disk.due
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
        """Ask the remote tier which blocks it has for requests that arrived."""
        if self._remote is not None and self._core.remote is not None:
            for request, keys in self._faults.ask("seen", self._core.remote.take_asks, list[Ask]()):
                self._remote.ask(request, keys)

    def take_facts(self, now: float) -> list[facts.Fact]:
        """Return the facts for the core; if no job begins or ends in time, that the open ones are overdue (R16)."""
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
        """Warn once if a tier opens for longer than a minute in which the engine makes steps."""
        self._opening_s += min(now - self._stepped_at, _LONGEST_STEP_S)
        self._stepped_at = now
        stages = {name: catalog.opening for name, catalog in self._catalogs.items() if catalog.opening}
        self.is_opening = bool(stages) and self._opening_s < OPENING_S
        if not self.is_opening:
            for name, stage in stages.items():
                note = "the engine goes on without the tier until it is open"
                log.warning("tier_still_opening", tier=name, stage=stage, after_s=OPENING_S, note=note)

    def moved(self, now: float) -> None:
        """Note that jobs on these tiers began or ended: the time limit of the others starts again."""
        self.overdue_at = now + self._patience_s

    def reported(self, reports: Sequence[TransferReport], now: float, *, has_moved: bool) -> None:
        """Take ranks' reports; `has_moved` says whether jobs on these tiers ended."""
        if has_moved:
            self.moved(now)
        if self.disk is not None and self.awaits_files:
            self.awaits_files = self.disk.ranks_reported(reports)
        if self.records:
            self.record()

    def record(self) -> None:
        """Pass records to the disk's index."""
        if self.disk is not None and self._core.disk is not None:
            records = self._faults.ask("disk", self._core.disk.take_records, list[DiskRecord]())
            if records:
                self.disk.append(records)

    def rest(self, now: float) -> None:
        """Note that the last request has ended."""
        self._idle_since = now

    @property
    def has_work(self) -> bool:
        """Whether an engine without requests must keep stepping for these tiers. Without steps no end of a copy is noticed."""
        is_opening = self.disk is not None and self.disk.is_opening
        is_busy = is_opening or self._jobs.pending
        if not (is_busy or self._faults.ask("has_work", lambda: self._tiers.is_due, False)):
            return False
        now = self._now()
        if self._idle_since is None:  # the engine begins to serve
            self._idle_since = now
        if now - self._idle_since < self._drain_s:
            return True
        self._late_steps = _LATE_STEPS
        return False

    def reset(self) -> bool:
        """Invalidate what these tiers have; return whether that holds for later processes too."""
        if self._remote is not None:
            self.polls_at = -inf
        are_done = [
            catalog.reset() for catalog in self._catalogs.values()
        ]  # the second also if the first is not done
        return all(are_done)

    def close(self) -> None:
        """Write pending records and close the tiers, without waiting for one that hangs."""
        self.record()
        for catalog in self._catalogs.values():
            catalog.close()
