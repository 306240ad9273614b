"""The hooks' stopwatch: how long the engine's thread spent in each hook of a step."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.labels import Hook


class Stopwatch:
    """Times one hook: a context for what it does. A hook does not run inside itself.

    Args:
        hook: its name.
        now: monotonic seconds.
        ran: takes the watch when it has something to tell.
    """

    __slots__ = ("_began", "_now", "_ran", "calls", "hook", "seconds")

    def __init__(self, hook: Hook, now: Callable[[], float], ran: list[Stopwatch]) -> None:
        self.hook = hook
        self._now = now
        self._ran = ran
        self._began = 0.0
        self.calls = 0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *error: object) -> None:
        # As in `add`: a call more would be a tenth of the shortest hooks.
        if not self.calls:
            self._ran.append(self)
        self.calls += 1
        self.seconds += self._now() - self._began

    def add(self, seconds: float) -> None:
        """Note a call that took so long."""
        if not self.calls:
            self._ran.append(self)
        self.calls += 1
        self.seconds += seconds


class HookTimes:
    """Adds up the time in each hook and gives one sample a hook and step.

    The scheduler side's own hooks have their stopwatches as attributes, since to look one up takes as long as to use it.

    Args:
        counters: takes the samples.
        now: monotonic seconds.
    """

    def __init__(self, counters: Counters, now: Callable[[], float]) -> None:
        self._counters = counters
        self._ran: list[Stopwatch] = []  # in this step
        watches = self._watches = {hook: Stopwatch(hook, now, self._ran) for hook in Hook}
        self.seen, self.lookup, self.allocated = (
            watches[Hook.SEEN],
            watches[Hook.LOOKUP],
            watches[Hook.ALLOCATED],
        )
        self.step, self.offer, self.ended = watches[Hook.STEP], watches[Hook.OFFER], watches[Hook.ENDED]
        self.report, self.reset = watches[Hook.REPORT], watches[Hook.RESET]

    def add(self, hook: Hook, seconds: float) -> None:
        """Note a call of a hook that somebody else timed."""
        self._watches[hook].add(seconds)

    def step_ended(self) -> None:
        """A step is over: one sample for each hook that was called in it."""
        for watch in self._ran:
            self._counters.hook(watch.hook, watch.seconds)
            watch.calls, watch.seconds = 0, 0.0
        self._ran.clear()
