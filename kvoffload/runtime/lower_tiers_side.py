"""The tiers below the host on the scheduler's side: their indexes, and the steps that an engine makes for them alone.

    step ─▶ what the core must learn: of an index, of the store, of jobs that nothing moves ─▶ records for the disk's index
    report ─▶ slot files that were opened, records
    last request ended ─▶ steps for spills and a warm start, for `drain_s` at most

Engines do not announce a shutdown: they end their requests, step while anything has work, and stop. So a shutdown spills what it can
within `drain_s`, and takes no longer. The same seconds let an engine that just started read the disk's index before its first request.

The attributes are for the hooks, which ask them before they call anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Sized
from math import inf

from kvoffload.core.state import CoreState
from kvoffload.core.tier_copies import LowerTiers
from kvoffload.core.tiers import Ask
from kvoffload.disk.identity import KVIdentity
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.disk import DiskRecord
from kvoffload.model.transfer import TransferReport
from kvoffload.runtime.disk_index import DiskIndex
from kvoffload.runtime.faults import Faults
from kvoffload.runtime.remote_index import RemoteIndex

log = get_logger("tiers")

_PATIENCE = 10
"""Multiples of `transfer_timeout_s` within which some job must begin or end. Workers end hanging calls themselves, after one."""

_POLL_S = 0.02
"""Seconds between two polls of a store while no call has ended: the polls are for time limits, which are much longer."""

OPENING_S = 60.0
_LONGEST_STEP_S = 1.0
"""An engine without requests makes no steps, and nothing opens meanwhile: a longer pause counts as no more than this."""

_LATE_STEPS = 4
"""In which what ended while no step was made is reported, also where steps are scheduled ahead of reports."""


class LowerTiersSide:
    """What `SchedulerSide` knows of the tiers below the host.

    Args:
        tiers: the core's.
        state: the core's.
        faults: asks a core that may raise.
        disk: its index, None without one.
        remote: the store's, None without one.
        now: monotonic seconds.
        timeout_s: `transfer_timeout_s`.
        drain_s: seconds for which the engine may step for these tiers alone.

    Attributes:
        due: what the core must learn of the disk's index.
        ended: calls of the store that have ended; the next step asks for facts.
        polls_at: when a step asks for facts although none has.
        asks: questions for the store.
        records: what the disk's index must record.
        overdue_at: when the open jobs are overdue, if none begins or ends before.
        awaits_files: whether ranks have not opened their slot files yet.
        is_opening: whether a step must look at a tier that opens; False from the warning on that one takes long.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        state: CoreState,
        faults: Faults,
        disk: DiskIndex | None,
        remote: RemoteIndex | None,
        now: Callable[[], float],
        *,
        timeout_s: float,
        drain_s: float,
    ) -> None:
        self._tiers = tiers
        self._core = state
        self._jobs = state.jobs
        self._faults = faults
        self.disk = disk
        self._remote = remote
        self._now = now
        self._patience_s = _PATIENCE * timeout_s
        self._drain_s = drain_s
        self._idle_since: float | None = None
        self._late_steps = 0
        self.due: deque[Callable[[], facts.Fact]] = deque() if disk is None else disk.due
        self.ended: Sized = () if remote is None else remote.ended
        self.polls_at = inf if remote is None else -inf
        self.asks: list[Ask] = [] if state.remote is None else state.remote.asks
        self.records: list[DiskRecord] = [] if state.disk is None else state.disk.records
        self.overdue_at = inf
        self.awaits_files = disk is not None
        self.is_opening = True
        self._opening_s = 0.0
        self._stepped_at = -inf

    @property
    def disk_identity(self) -> KVIdentity | None:
        """What the KV in the disk's folder depends on; None before this process has locked the folder."""
        return None if self.disk is None else self.disk.identity

    def ask(self) -> None:
        """Ask the store which blocks it has for requests that arrived."""
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
        if self.disk is not None and self.disk.due:
            found.append(self.disk.next_fact())
        if self._remote is not None:
            self._remote.poll()
            found += self._remote.take_due()
            self.polls_at = now + _POLL_S if self._remote.is_opened else -inf
        return found

    def _look_at_opening(self, now: float) -> None:
        """Warn once if a tier opens for longer than a minute in which the engine makes steps."""
        self._opening_s += min(now - self._stepped_at, _LONGEST_STEP_S)
        self._stepped_at = now
        tiers = {"disk": self.disk, "remote": self._remote}
        stages = {name: tier.opening for name, tier in tiers.items() if tier is not None and tier.opening}
        self.is_opening = bool(stages) and self._opening_s < OPENING_S
        if not self.is_opening:
            for name, stage in stages.items():
                note = "the engine goes on without the tier until it is open"
                log.warning("tier_still_opening", tier=name, stage=stage, after_s=OPENING_S, note=note)

    def moved(self, now: float) -> None:
        """Jobs on these tiers have begun or ended: the time limit of the others starts again."""
        self.overdue_at = now + self._patience_s

    def reported(self, reports: Sequence[TransferReport], now: float, *, has_moved: bool) -> None:
        """Ranks reported; `has_moved` says whether jobs on these tiers ended."""
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
        """The last request has ended."""
        self._idle_since = now

    @property
    def has_work(self) -> bool:
        """Whether an engine without requests must keep stepping for these tiers. After that nothing notices the ends of copies."""
        is_opening = self.disk is not None and self.disk.is_opening
        if not (is_opening or self._jobs.pending or self._faults.ask("has_work", self._is_due, False)):
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
        is_done = self.disk is None or self.disk.reset()
        if self._remote is not None:
            is_done &= self._remote.reset()
            self.polls_at = -inf
        return is_done

    def close(self) -> None:
        """Write what is to be recorded, and wait for no tier that hangs."""
        if self.disk is not None:
            self.record()
            self.disk.close()
        if self._remote is not None:
            self._remote.close()

    def _is_due(self) -> bool:
        return self._tiers.is_due
