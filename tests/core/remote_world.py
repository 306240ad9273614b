"""The small engine with a remote store below its host, and the store: what every rank wrote into it, by namespace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.remote_state import RemoteState
from kvoffload.core.state import Policy
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import BlockKey, JobId, Rank
from kvoffload.model.transfer import Direction, JobReport, RemoteJob, TransferReport
from tests.core.world import CORRUPT, DONE, FAILED, GARBAGE, Req, World, keys_of

Store = dict[tuple[str, BlockKey, int], BlockKey]


class RemoteWorld(World):
    """A world with a store, which it may share with another.

    Args:
        groups: as of the world.
        store: what engines have written; a rank's value is the key of the block whose bytes it has.
        after_hits: `share_after_hits`.
        opens: the store is reached at once.
        settings: as of the world.
    """

    def __init__(
        self,
        *groups: GroupSpec,
        store: Store | None = None,
        after_hits: int = 1,
        opens: bool = True,
        **settings: Any,  # noqa: ANN401  # the world's own
    ) -> None:
        self.after_hits = after_hits
        self.store: Store = {} if store is None else store
        self.works = True
        self.asked: list[tuple[str, tuple[BlockKey, ...]]] = []
        super().__init__(*groups, **settings)
        if opens:
            self.tell(facts.RemoteOpened("print/one"))

    def _make_core(self, policy: Policy) -> OffloadCore:
        with patch(
            "kvoffload.core.remote_state.MOST_HINTS", 64
        ):  # the audit looks at each of them after every fact
            return super()._make_core(replace(policy, share_after_hits=self.after_hits))

    @property
    def remote(self) -> RemoteState:
        assert self.core.state.remote is not None
        return self.core.state.remote

    def add(self, name: str, text: str, *, reads_cache: bool = True, answers: bool = True) -> Req:
        """As of any world; the store answers at once, or when the test says so."""
        request = super().add(name, text, reads_cache=reads_cache)
        self.asked += self.core.below.take_asks() if self.core.below is not None else []
        if answers:
            self.answer()
        return request

    def answer(self) -> None:
        """The store says what it has of all it was asked for."""
        asked, self.asked = self.asked, []
        last = len(self.ranks) - 1
        for request, keys in asked:
            namespace = self.remote.namespace
            has = tuple(key for key in keys if (namespace, key, last) in self.store)
            lacks = tuple(key for key in keys if key not in has)
            self.tell(facts.RemoteAnswered(request, namespace, has, lacks))  # type: ignore[arg-type]

    def report(
        self, rank: int, job: JobId, outcome: CopyOutcome = DONE, corrupt: tuple[int, ...] = ()
    ) -> None:
        copy = self.copies[job]
        if not isinstance(copy.job, RemoteJob):
            super().report(rank, job, outcome, corrupt)
            return
        copy.running.remove(Rank(rank))
        if not copy.running:
            del self.copies[job]
        move = self._put if copy.job.direction is Direction.STORE else self._get
        self._tell_report(rank, move(rank, copy.job, outcome))

    def _put(self, rank: int, job: RemoteJob, outcome: CopyOutcome) -> JobReport:
        if outcome is DONE:
            for slot, key in zip(job.slots, job.keys, strict=True):
                self.store.setdefault((job.namespace, key, rank), self.host[rank][slot])
        return JobReport(job.job, job.direction, outcome, 0, 0.0, 0.0)

    def _get(self, rank: int, job: RemoteJob, outcome: CopyOutcome) -> JobReport:
        wrong, missing = list[int](), list[int]()
        for at, (slot, key) in enumerate(zip(job.slots, job.keys, strict=True)):
            held = self.store.get((job.namespace, key, rank))
            if held is None or outcome is FAILED:
                missing.append(at)
            elif held != key:
                wrong.append(at)
            self.host[rank][slot] = key if held == key and outcome is DONE else GARBAGE
            self.host_age[slot] = self.resets
            self.rotten.discard((rank, slot))
        if len(wrong) + len(missing) == len(job.keys):
            outcome = CORRUPT if wrong else FAILED
        return JobReport(job.job, job.direction, outcome, 0, 0.0, 0.0, tuple(wrong), missing=tuple(missing))

    def ready_up_to(self, slots: int, *, is_growing: bool = False) -> None:
        self.ready, self.is_growing = slots, is_growing
        for rank in self.ranks:
            self._tell_report(rank)

    def _tell_report(self, rank: int, *parts: JobReport) -> None:
        report = TransferReport(
            Rank(rank), parts, self.ready, is_growing=self.is_growing, remote_works=self.works
        )
        self.last_reports[Rank(rank)] = report
        self.tell(facts.TransferReported(report))

    def fails(self, *, works: bool = False) -> None:
        """Every rank says that the store does not answer, or answers again."""
        self.works = works
        for rank in self.ranks:
            self._tell_report(rank)

    def evicted(self) -> int:
        """Blocks that left the host, less those that came from the store."""
        return super().evicted() - self.copied(Direction.LOAD)

    def copied(self, direction: Direction, outcome: TierOutcome = TierOutcome.DONE) -> int:
        """Blocks copied to the store or from it so far."""
        ended = self.reported(TierCopyEnded)
        return sum(each.blocks for each in ended if (each.direction, each.outcome) == (direction, outcome))

    def remote_jobs(self, direction: Direction) -> list[JobId]:
        return [
            number
            for number, copy in self.copies.items()
            if isinstance(copy.job, RemoteJob) and copy.job.direction is direction
        ]

    def in_store(self, text: str, rank: int = 0) -> str:
        """Which blocks of a text the store has: one character a block, x or a dot."""
        namespace = self.remote.namespace
        keys = keys_of(text, self.groups[0])
        return "".join("x" if (namespace, key, rank) in self.store else "." for key in keys)

    def spoil(self, text: str, rank: int = 0) -> None:
        """Another writer wrote under the name of the text's last block."""
        self.store[self.remote.namespace, keys_of(text, self.groups[0])[-1], rank] = GARBAGE

    def serve(self, name: str, text: str) -> Req:
        request = self.add(name, text)
        while self.admit(request) is None:
            self.idle_step()
            self.finish()
        self.step()
        self.finish()
        self.run(request)
        self.end(request)
        self.drain()
        return request

    def share(self, text: str) -> None:
        """Have a text computed, found again and written to the store."""
        self.serve("first", text)
        self.serve("again", text)
        for _ in range(10):
            self.idle_step()
            self.finish()
