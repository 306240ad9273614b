"""The loads that the engine waits for: each is answered exactly once, even if the core breaks meanwhile (R9, R12)."""

from __future__ import annotations

from collections.abc import Collection

from kvoffload.core.state import LoadResults
from kvoffload.model.ids import RequestId


class AwaitedLoads:
    """Requests that the engine told of an allocation with external tokens, and has not heard of since.

    Args:
        timeout_s: seconds after which nothing is waited for once the core is broken.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def began(self, request: RequestId, now: float) -> None:
        """The engine waits for a load."""
        self._since[request] = now

    def heard(self, results: LoadResults) -> LoadResults:
        """The core answered: return what the engine has not been told yet."""
        if not (results.loaded or results.failed):
            return results
        return LoadResults(
            list(filter(self._is_over, results.loaded)), list(filter(self._is_over, results.failed))
        )

    def give_up(self, open_loads: Collection[RequestId], now: float) -> list[RequestId]:
        """With the core broken, hand over the requests of which it will not, or not in time, speak again."""
        lost = [
            request
            for request, since in self._since.items()
            if request not in open_loads or now - since >= self._timeout_s
        ]
        for request in lost:
            del self._since[request]
        return lost

    def _is_over(self, request: RequestId) -> bool:
        """Strike a request off; return whether it was awaited."""
        return self._since.pop(request, None) is not None
