"""What a reset found under way, until it has ended: the call's answer, a metric and the log all say the same."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.bus.bus import Bus
from kvoffload.core.jobs import Jobs
from kvoffload.core.machine import JobState
from kvoffload.model.events import Event, ResetEnded, ResetStarted
from kvoffload.model.ids import JobId


class Resets:
    """Follows the jobs from before the last reset. Nothing that they bring is found; their memory is theirs until they end.

    Args:
        jobs: the open ones.
        publish: takes the event of the end.
    """

    def __init__(self, jobs: Jobs, publish: Callable[[Event], object]) -> None:
        self._jobs = jobs
        self._publish = publish
        self._generation = 0
        self._left: set[JobId] = set()
        self._abandoned = 0
        self.draining = 0
        """How many of them have not ended. Written whole, so another thread may read it."""

    def subscribe(self, bus: Bus) -> None:
        """Follow resets from now on."""
        bus.count(ResetStarted, self._started)

    def look(self) -> None:
        """Jobs may have ended. Those that were abandoned are nothing that anyone waits for."""
        if not self.draining:
            return
        for number in tuple(self._left):
            job = self._jobs.open.get(number)
            if job is None or job.state is JobState.ABANDONED:
                self._left.discard(number)
                self._abandoned += job is not None
        self.draining = len(self._left)
        if not self.draining:
            self._publish(ResetEnded(self._generation, self._abandoned))

    def forget_all(self) -> None:
        """Which jobs have ended can no longer be known."""
        self._left.clear()
        self.draining = 0

    def _started(self, event: ResetStarted) -> None:
        self._generation = event.generation
        self._abandoned = 0
        self._left = {job.id for job in self._jobs.open.values() if job.state is not JobState.ABANDONED}
        self.draining = len(self._left)
        if not self.draining:
            self._publish(ResetEnded(self._generation, 0))
