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

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol, TypeVar

from kvoffload.core.host import HostState
from kvoffload.core.tier_store import TierStore
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.wire import Tier, TransferReport
from kvoffload.runtime.tier_kinds import Catalog

Answer = TypeVar("Answer")

log = get_logger("tiers")

_PATIENCE = 10
"""Open jobs are overdue if no job begins or ends for this many times `transfer_timeout_s`.

Workers report a call that hangs much earlier, after its own time limit.
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
        state: the host's state.
        store: the tiers' copies.
        catalogs: the scheduler's part of each tier, in the order in which the tiers are searched.
        faults: calls the core and handles the core's exceptions.
        monotonic: returns the time in seconds, from a clock that never goes back.
        timeout_s: the setting `transfer_timeout_s`.
        drain_s: the setting `disk_drain_s`.

    Attributes:
        catalogs: see above.
        now: see `monotonic`.
        arrived: of each catalog, a container. While one is not empty, each step calls `take_facts`.
        outboxes: of each tier, what its catalog must do. While one is not empty, hooks call `send`.
        due_at: the time at which a step calls `take_facts` even if nothing has arrived.
        awaits_ranks: True while a rank's report about a tier is missing.
    """

    def __init__(
        self,
        state: HostState,
        store: TierStore,
        catalogs: Mapping[Tier, Catalog],
        faults: AsksCore,
        monotonic: Callable[[], float],
        *,
        timeout_s: float,
        drain_s: float,
    ) -> None:
        self.catalogs = catalogs
        self._pairs = [
            (state.pool if tier is Tier.HOST else state.by_name[tier], catalog)
            for tier, catalog in catalogs.items()
        ]
        self._store = store
        self._jobs = state.jobs
        self._faults = faults
        self.now = monotonic
        self._patience_s = _PATIENCE * timeout_s
        self._drain_s = drain_s
        self._idle_since: float | None = None
        self._late_steps = 0
        self.arrived = tuple([catalog.arrived for catalog in catalogs.values()])
        self.outboxes = tuple([outbox for tier, _ in self._pairs if (outbox := tier.for_catalog) is not None])
        self.due_at = -inf
        self._overdue_at = inf  # when the open jobs become overdue, unless a job begins or ends before
        self.awaits_ranks = bool(catalogs)
        # True until all tiers are open, or until the log has a warning about a tier that opens slowly.
        self._is_opening = True
        self._opening_s = 0.0
        self._stepped_at = -inf

    def take_facts(self, now: float) -> list[facts.Fact]:
        """Return new facts for the core. If no open job has moved for long, report all as overdue (R16)."""
        found: list[facts.Fact] = []
        if self._is_opening:
            self._look_at_opening(now)
        if self._overdue_at <= now and self._late_steps:
            self._late_steps -= 1
        elif self._overdue_at <= now:
            self._overdue_at = inf
            found += map(facts.JobOverdue, self._jobs.on_tiers())
        for catalog in self.catalogs.values():
            found += catalog.take_facts()
        polls_s = -inf if self._is_opening else min([catalog.poll_s for catalog in self.catalogs.values()])
        self.due_at = min(now + polls_s, self._overdue_at)
        return found

    def _look_at_opening(self, now: float) -> None:
        """Log a warning, once, if a tier is not open after the engine has been stepping for a minute."""
        self._opening_s += min(now - self._stepped_at, _LONGEST_STEP_S)
        self._stepped_at = now
        stages = {tier: catalog.opening for tier, catalog in self.catalogs.items() if catalog.opening}
        self._is_opening = bool(stages) and self._opening_s < OPENING_S
        if not self._is_opening:
            for tier, stage in stages.items():
                note = "the engine continues without the tier until it is open"
                log.warning("tier_still_opening", tier=tier.value, stage=stage, after_s=OPENING_S, note=note)

    def moved(self, now: float) -> None:
        """Restart the time limit of open jobs, because one of them began or ended."""
        self._overdue_at = now + self._patience_s
        self.due_at = min(self.due_at, self._overdue_at)

    def reported(self, reports: Sequence[TransferReport], now: float, *, has_moved: bool) -> None:
        """Process the ranks' reports; `has_moved` is True if a job on these tiers has ended."""
        if has_moved:
            self.moved(now)
        if self.awaits_ranks:
            waiting = [catalog for catalog in self.catalogs.values() if catalog.awaits_ranks]
            for catalog in waiting:
                catalog.ranks_reported(reports)
            self.awaits_ranks = any(catalog.awaits_ranks for catalog in waiting)
        self.send()

    def send(self) -> None:
        """Pass what the core wants of the catalogs to them."""
        for tier, catalog in self._pairs:
            if tier.for_catalog and (
                items := self._faults.ask("catalog", tier.take_for_catalog, list[Any]())
            ):
                catalog.send(items)

    def rest(self, now: float) -> None:
        """Record when the last request ended."""
        self._idle_since = now

    @property
    def has_work(self) -> bool:
        """Return whether an engine without requests must keep stepping for these tiers, at most for `disk_drain_s`."""
        is_restoring = any(catalog.is_restoring for catalog in self.catalogs.values())
        is_busy = is_restoring or self._jobs.pending
        if not (is_busy or self._faults.ask("has_work", lambda: self._store.is_due, False)):
            return False
        now = self.now()
        if self._idle_since is None:  # the engine has just started
            self._idle_since = now
        if now - self._idle_since < self._drain_s:
            return True
        self._late_steps = _LATE_STEPS
        return False

    def reset(self) -> bool:
        """Discard all blocks on these tiers; return True if later processes cannot find these blocks either."""
        self.due_at = -inf
        # A list instead of a generator: every catalog must be reset, even if the first reset is incomplete.
        are_done = [catalog.reset() for catalog in self.catalogs.values()]
        return all(are_done)

    def close(self) -> None:
        """Write pending records and close the tiers. If a disk hangs, return after `disk_drain_s`."""
        self.send()
        for catalog in self.catalogs.values():
            catalog.close()
