"""What worlds with a disk and worlds with a remote tier have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from kvoffload.core.tiers import LowerTier
from kvoffload.model.causes import CopyOutcome, TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import JobId
from kvoffload.model.wire import Direction, Tier, TierStatus
from tests.core.world import DONE, Req, World, keys_of

LOAD, STORE = Direction.LOAD, Direction.STORE
# Four blocks; a lookup returns at most three, because the engine must compute the last token.
TEXT = "abcdefghijklmnop"
OTHER = "ABCDEFGHIJKLMNOP"


class LowerWorld(World):
    """A world with a lower tier. `min_hits` is the tier's `disk_min_hits` or `remote_min_hits`."""

    TIER: ClassVar[Tier]

    def __init__(self, *groups: GroupSpec, min_hits: int = 1, **settings: Any) -> None:  # noqa: ANN401
        self.min_hits = min_hits
        self.failing: dict[Tier, set[int]] = {Tier.DISK: set(), Tier.REMOTE: set()}
        """For each lower tier, the ranks on which the tier fails."""
        super().__init__(*groups, **settings)

    @classmethod
    def holding(cls, *texts: str, groups: Sequence[GroupSpec] = (), **settings: Any) -> Self:  # noqa: ANN401
        """Return a world whose lower tier has these texts, which the device and the host have lost."""
        world = cls(*groups, **settings)
        for text in texts:
            world.serve_twice(text)
        world.empty_host()
        return world

    @property
    def lower(self) -> LowerTier:
        return next(tier for tier in self.core.state.tiers if tier.tier is self.TIER)

    def tier_jobs(self, direction: Direction) -> list[JobId]:
        return [
            number
            for number, copy in self.copies.items()
            if copy.job.tier is self.TIER and copy.job.direction is direction
        ]

    def start_job(self, direction: Direction) -> JobId:
        """Run a step without requests; return the tier's only job in this direction."""
        self.idle_step()
        [job] = self.tier_jobs(direction)
        return job

    def copied(self, direction: Direction, outcome: TierOutcome = TierOutcome.DONE) -> int:
        """Return how many blocks have been copied to or from the tier with this outcome."""
        wanted = self.TIER, direction, outcome
        ended = self.reported(TierCopyEnded)
        return sum(each.blocks for each in ended if (each.tier, each.direction, each.outcome) == wanted)

    def below(self, text: str, group: int = 0) -> str:
        """Return one character for each block of a text: "x" if the block can be fetched, otherwise "."."""
        index = self.lower.pool.index
        return "".join("x" if key in index else "." for key in keys_of(text, self.groups[group]))

    def serve(self, name: str, text: str, *, drains: bool = True) -> Req:
        """Serve as in `World`, but first wait until the text's blocks have been fetched from lower tiers.

        If `drains` is false, spills stay open.
        """
        request = self.add(name, text)
        while self.admit(request) is None:
            assert self.core.has_work, f"{name} waits for nothing"
            self.copy_all()
        self.load_and_run(request)
        self.end(request)
        if drains:
            self.drain()
        return request

    def serve_twice(self, text: str) -> None:
        """Serve a text twice, so that its blocks become spill candidates; wait until all copies have ended."""
        self.serve(f"{text} once", text)
        self.serve_again(f"{text} again", text)

    def serve_again(self, name: str, text: str) -> None:
        self.serve(name, text)
        self.settle()

    def settle(self) -> None:
        for _ in range(100):
            if not (self.core.has_work or any(tier.candidates for tier in self.core.state.tiers)):
                return
            self.copy_all()
        raise AssertionError("spills without end")

    def empty_host(self) -> None:
        """Replace the host's contents with other texts, and reset the device's cache."""
        self.device.forget_keys()
        for number in range(self.pool.capacity):
            self.serve(f"filler{number}", f"{number:04}{number:04}"[: self.groups[0].block_tokens + 1])
        self.device.forget_keys()

    def fetched(self, name: str, text: str = TEXT) -> Req:
        """Add a request whose lookup waits for a fetch; end the fetch, and return the request."""
        request = self.add(name, text)
        assert self.lookup(request) is None
        self.copy_all()
        return request

    def fetching(self, name: str = "late", text: str = TEXT) -> tuple[Req, JobId]:
        """Add a request whose lookup waits for a fetch; return the request and the open fetch."""
        request = self.add(name, text)
        assert self.lookup(request) is None
        return request, self.start_job(LOAD)

    def spilling(self) -> JobId:
        """Serve a text twice, which starts a spill of its blocks; return the spill's job."""
        self.serve("once", TEXT)
        self.serve("again", TEXT, drains=False)
        return self.start_job(STORE)

    def fails(self, *ranks: int, works: bool = False, tier: Tier | None = None) -> None:
        """Report that the tier fails on these ranks (by default all), or that it works again."""
        failing = self.failing[tier or self.TIER]
        for rank in ranks or self.ranks:
            (failing.discard if works else failing.add)(rank)
            self._tell_report(rank)

    def report(
        self,
        rank: int,
        job: JobId,
        outcome: CopyOutcome = DONE,
        corrupt: tuple[int, ...] = (),
        **details: Any,  # noqa: ANN401  # of the tier's copies
    ) -> None:
        """Report as in `World`, with `details` of a copy with a lower tier.

        With `stuck`, calls to the disk hang that may still change these places of the job. With `takes`, a
        full store accepts only this many values.
        """
        if self.copies[job].job.tier is Tier.HOST:
            super().report(rank, job, outcome, corrupt)
            return
        copied = self._end_copy(rank, job)
        move = getattr(self, f"_{copied.tier.value}_{copied.direction.value}")  # as `_disk_store`
        self._tell_report(rank, move(rank, copied, outcome, corrupt, **details))

    def _statuses(self, rank: int) -> tuple[TierStatus, ...]:
        return tuple([TierStatus(tier, rank not in ranks) for tier, ranks in self.failing.items()])
