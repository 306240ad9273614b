"""How long to wait before asking again."""

from __future__ import annotations

_FIRST_S = 0.0002  # shorter than a job of a few blocks takes
_LONGEST_S = (
    0.005  # the interpreter's own switch interval: asking more often gains nothing while the engine computes
)


class Backoff:
    """Intervals that double while nothing happens and start again when something does."""

    def __init__(self, first_s: float = _FIRST_S, longest_s: float = _LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.next_s = first_s
        """Seconds to wait before the next look."""

    def note(self, *, progress: bool) -> None:
        """Take note of a poll's result."""
        self.next_s = self._first_s if progress else min(2 * self.next_s, self._longest_s)
