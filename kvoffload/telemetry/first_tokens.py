"""Times to first token, by what the lookup found.

No engine reports a token when it is sampled. So each step checks the admitted requests that have none yet: the time is that
of the first step after the token, or of the request's end. A step without such requests costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.bus.bus import Bus
from kvoffload.model import facts
from kvoffload.model.causes import Found
from kvoffload.model.events import FirstTokenReached, LookupAnswered
from kvoffload.model.ids import RequestId
from kvoffload.model.transfer import Tier

HasToken = Callable[[], object]
"""What it returns is true once there is a token."""


_FOUND = {Tier.DISK: Found.DISK, Tier.REMOTE: Found.REMOTE}


class FirstTokens:
    """Follows requests from their arrival to their first token. On the engine's thread.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._publish: Callable[[FirstTokenReached], None] = lambda event: None
        self.waiting: dict[RequestId, tuple[float, HasToken]] = {}
        """Requests without a token: since when, and what says whether the first is there, until the request has ended."""
        self.admitted: dict[RequestId, Found] = {}
        """Admitted requests without a token, and what their last lookup found."""

    def subscribe(self, bus: Bus) -> None:
        """Follow admissions and ends from now on, and publish first tokens."""
        self._publish = bus.publish
        bus.count(LookupAnswered, self._settled)
        bus.count(facts.RequestEnded, self._ended)

    def expect(self, request: RequestId, has_token: HasToken) -> None:
        """Measure the time from now until a request's first token."""
        self.waiting[request] = self._now(), has_token

    def look(self) -> list[FirstTokenReached]:
        """Return the events of requests whose first token exists; called when a step is scheduled."""
        return [self._arrived(request) for request in tuple(self.admitted) if self.waiting[request][1]()]

    def _settled(self, event: LookupAnswered) -> None:
        if event.request in self.waiting:
            found = Found.DEVICE if event.device_tokens else Found.NOTHING
            host = _FOUND[event.fetched_from] if event.fetched_tokens else Found.HOST
            self.admitted[event.request] = host if event.hit_tokens else found

    def _ended(self, fact: facts.RequestEnded) -> None:
        request = fact.request
        if request in self.admitted and self.waiting[request][1]():
            self._publish(self._arrived(request))
        elif self.waiting.pop(request, None) is not None:
            self.admitted.pop(request, None)

    def _arrived(self, request: RequestId) -> FirstTokenReached:
        waited_s = self._now() - self.waiting.pop(request)[0]
        return FirstTokenReached(request, self.admitted.pop(request), waited_s)
