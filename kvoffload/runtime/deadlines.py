"""Which lookups have waited too long (R14)."""

from __future__ import annotations

from kvoffload.model.ids import RequestId


class Patience:
    """How long a request may be told "not yet".

    Args:
        timeout_s: seconds from the first such answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[RequestId, float] = {}

    def may_wait(self, request: RequestId, now: float) -> bool:
        """Whether a lookup may answer "not yet" once more."""
        since = self._since.get(request)
        return since is None or now - since < self._timeout_s

    def waits(self, request: RequestId, now: float) -> None:
        """A lookup answered "not yet"."""
        self._since.setdefault(request, now)

    def over(self, request: RequestId) -> None:
        """The request was admitted, or is gone."""
        self._since.pop(request, None)
