"""The loads that the engine waits for: each is answered exactly once, even if the core breaks meanwhile (R9, R12)."""

from __future__ import annotations

from kvoffload.core.state import LoadResults
from kvoffload.model.ids import RequestId


class AwaitedLoads:
    """Requests that the engine told of an allocation with external tokens, and has not been answered since."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def began(self, request: RequestId) -> None:
        """The engine waits for a load."""
        self._requests[request] = None

    def answered(self, results: LoadResults) -> LoadResults:
        """The core answered: return what the engine has not been told yet."""
        if not (results.loaded or results.failed):
            return results
        return LoadResults(
            list(filter(self._is_awaited, results.loaded)), list(filter(self._is_awaited, results.failed))
        )

    def give_up(self) -> list[RequestId]:
        """The core will not answer any more: hand over the requests that are to be told that their load failed."""
        lost = list(self._requests)
        self._requests.clear()
        return lost

    def _is_awaited(self, request: RequestId) -> bool:
        """Strike a request off; return whether it was awaited."""
        return self._requests.pop(request, self) is None
