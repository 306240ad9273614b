"""Checks of the conservation laws: a part at each rest, all on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.core.offload_core import OffloadCore
from kvoffload.model.causes import DegradeCause
from kvoffload.model.engine import AuditsLeases
from kvoffload.model.facts import InvariantBroken
from kvoffload.model.ids import SlotId
from kvoffload.telemetry.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffload.model.engine import BlockPool
    from kvoffload.runtime.broken_core import BrokenCore

_SLOTS_AT_REST = 16  # some ten microseconds in all: the next request may be a moment away


class Conservation:
    """Compares slots, pins, leases and jobs, and the engine's own reference counts where it lets them be read.

    At rest nothing may be left over, which totals show at once. What a slot's record says is compared for some slots
    at a time, and the next time for the next ones, so that the cost does not grow with the host's memory.

    Args:
        core: the core to audit.
        device: the engine's block pool.
        counters: count the audits.
        report: publishes the fact that a law is broken, which switches offloading off (R12).
        broken: asks the core, and answers for one that has raised.
    """

    def __init__(
        self,
        core: OffloadCore,
        device: BlockPool,
        counters: Counters,
        report: Callable[[InvariantBroken], None],
        broken: BrokenCore,
    ) -> None:
        self._core = core
        self._device = device if isinstance(device, AuditsLeases) else None
        self._counters = counters
        self._report = report
        self._broken = broken
        self._next_slot = 0

    def in_full(self) -> list[str]:
        """Return every violated law, at any time between two hooks. Costs time in the size of the pool."""
        problems: list[str] = self._broken.ask("audit", self._all_problems, [])
        return self._judge(problems) if self._broken.error is None else self._broken.problems()

    def at_rest(self) -> None:
        """The last request has ended and no copy is waited for: look at what shows at once, in bounded time."""
        if self._core.state.degraded is None:
            self._judge([*self._core.audit_at_rest(self._some_slots()), *self._engine_problems()])

    def _judge(self, problems: list[str]) -> list[str]:
        self._counters.audited()
        if problems:
            self._report(InvariantBroken(DegradeCause.LAW_BROKEN, "; ".join(problems)))
        return problems

    def _all_problems(self) -> list[str]:
        return [*self._core.audit(), *self._engine_problems()]

    def _engine_problems(self) -> list[str]:
        return self._device.lease_problems(self._core.state.leases.counts) if self._device else []

    def _some_slots(self) -> Iterator[SlotId]:
        capacity = self._core.state.pool.capacity
        first = self._next_slot if self._next_slot < capacity else 0
        self._next_slot = min(first + _SLOTS_AT_REST, capacity)
        return map(SlotId, range(first, self._next_slot))
