"""How long the engine's thread spent in each hook of a step.

Each hook adds its own time to `spent`, between two clock readings and without a call, because a call would be a tenth of the
shortest hooks.
"""

from __future__ import annotations

from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.labels import Hook


class HookTimes:
    """Adds up the time in each hook, and gives one sample a hook and step.

    Args:
        counters: takes the samples.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.spent: dict[Hook, float] = {}
        """Seconds in this step, by hook."""

    def add(self, hook: Hook, seconds: float) -> None:
        """Note a call of a hook that somebody else timed."""
        self.spent[hook] = self.spent.get(hook, 0.0) + seconds

    def step_ended(self) -> None:
        """A step is over: one sample for each hook that was called in it."""
        self._counters.hooks(self.spent)
        self.spent.clear()
