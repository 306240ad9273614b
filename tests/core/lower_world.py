from __future__ import annotations

from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.ids import JobId
from kvoffload.model.wire import Direction, Tier
from tests.core.world import Req, World


class LowerWorld(World):
    def jobs_of(self, tier: Tier, direction: Direction) -> list[JobId]:
        return [
            number
            for number, copy in self.copies.items()
            if copy.job.tier is tier and copy.job.direction is direction
        ]

    def copies_of(self, tier: Tier, direction: Direction, outcome: TierOutcome) -> int:
        """Return how many blocks have been copied to or from the tier with this outcome."""
        wanted = tier, direction, outcome
        ended = self.reported(TierCopyEnded)
        return sum(each.blocks for each in ended if (each.tier, each.direction, each.outcome) == wanted)

    def serve(self, name: str, text: str, *, drains: bool = True) -> Req:
        """Serve as in `World`, but first wait until the text's blocks have been fetched from lower tiers.

        If `drains` is false, spills stay open.
        """
        request = self.add(name, text)
        while self.admit(request) is None:
            self.idle_step()
            self.finish()
        self.load_and_run(request)
        self.end(request)
        if drains:
            self.drain()
        return request

    def fetched(self, name: str, text: str) -> Req:
        """Add a request whose lookup waits for a fetch; end the fetch, and return the request."""
        request = self.add(name, text)
        assert self.lookup(request) is None
        self.idle_step()
        self.finish()
        return request
