"""The hooks' stopwatch: how long the engine's thread spent in each hook of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.labels import Hook


class HookTimes:
    """Adds up the time in each hook and gives one sample a hook and step.

    Args:
        counters: takes the samples.
        now: monotonic seconds.
    """

    def __init__(self, counters: Counters, now: Callable[[], float]) -> None:
        self._counters = counters
        self._now = now
        self._seconds: dict[Hook, float] = {}

    @contextmanager
    def timed(self, hook: Hook) -> Iterator[None]:
        """Time what the `with` block does."""
        start = self._now()
        try:
            yield
        finally:
            self.add(hook, self._now() - start)

    def add(self, hook: Hook, seconds: float) -> None:
        """Note time spent in a hook."""
        self._seconds[hook] = self._seconds.get(hook, 0.0) + seconds

    def step_ended(self) -> None:
        """A step is over: one sample for each hook that was called in it."""
        for hook, seconds in self._seconds.items():
            self._counters.hook(hook, seconds)
        self._seconds.clear()
