"""The engine without a plugin: a scheduler side that has nothing and wants nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.engine.plugin import BlockTables, LoadResults, RequestView, StepFacts

if TYPE_CHECKING:
    from kvoffload.engine.block_pool import BlockPool


class NoPlugin:
    """Stands in for `SchedulerPlugin`, so that the scheduler never asks whether there is one."""

    def bind(self, pool: BlockPool) -> None:
        """Needs no pool."""

    def request_added(self, request: RequestView) -> None:
        """Keeps nothing."""

    def lookup(self, request: RequestView, device_tokens: int) -> int | None:
        """Finds nothing."""
        return 0

    def junction(self, request: RequestView) -> int:
        """Wants no state."""
        return 0

    def allocated(
        self, request: RequestView, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None:
        """Keeps nothing."""

    def plan(self, step: StepFacts) -> object:
        """Plans nothing."""
        return None

    def request_ended(self, request: RequestView, aborted: bool) -> None:
        """Keeps nothing."""

    def update(self, outputs: Sequence[object]) -> LoadResults:
        """Loads nothing."""
        return LoadResults()

    def has_pending_work(self) -> bool:
        """Never."""
        return False

    def reset(self) -> bool:
        """Nothing to forget."""
        return True

    def shutdown(self) -> None:
        """Nothing to stop."""
