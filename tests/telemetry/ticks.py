from __future__ import annotations

from collections import deque

from kvoffload.bus.current_hook import CurrentHook


class Ticks(CurrentHook):
    """Hooks that begin `step_s` seconds after one another, from each reading of the time to the next."""

    def __init__(self, step_s: float = 0.5) -> None:
        self._step_s = step_s
        self._at = 0.0
        self.steps = deque()

    @property
    def now(self) -> float:  # type: ignore[override]
        self._at += self._step_s
        return self._at

    def unix(self, at: float) -> float:
        return at
