"""A small simulated engine with a remote tier, and a simulated store of each rank's values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.core.tiers import RemoteTier
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.wire import JobReport, RemoteJob, Tier
from tests.core.below import remote_of
from tests.core.disk_world import DiskWorld
from tests.core.lower_world import LowerWorld
from tests.core.world import CORRUPT, DONE, FAILED, GARBAGE, Req, keys_of


class Value(NamedTuple):
    """A value in the remote tier: a block's contents, and how many resets preceded the block's computation."""

    held: BlockKey
    age: int


class Ask(NamedTuple):
    """A query that the remote tier has not answered yet."""

    request: RequestId
    keys: tuple[BlockKey, ...]
    namespace: str


Store = dict[tuple[str, BlockKey, int], Value]


class RemoteWorld(LowerWorld):
    """A world with a remote tier, whose `store` can be shared with other worlds."""

    TIER = Tier.REMOTE

    def __init__(
        self,
        *groups: GroupSpec,
        store: Store | None = None,
        hints: int = 64,  # at most
        is_reached: bool = True,  # whether the remote tier answers from the start
        namespace: str = "print/0",  # in which engines share blocks
        **settings: Any,  # noqa: ANN401  # the world's own
    ) -> None:
        self.hints = hints
        self.store: Store = {} if store is None else store
        self.namespace = namespace
        self.asked: list[Ask] = []
        super().__init__(*groups, **settings)
        if is_reached:
            self.reach()

    def _make_core(self, policy: Policy) -> OffloadCore:
        # each audit checks all hints, so many hints would make the tests slow
        with patch("kvoffload.core.tiers.MOST_HINTS", self.hints):
            return super()._make_core(replace(policy, tiers=(*policy.tiers, (RemoteTier, self.min_hits))))

    @property
    def remote(self) -> RemoteTier:
        return remote_of(self.core.state)

    def reach(self) -> None:
        """Report to the core that the remote tier answers, and which namespace it uses."""
        self.tell(facts.TierOpened(Tier.REMOTE, self.namespace))

    def reset(self) -> None:
        """Reset the cache: from now on, only blocks that this engine writes are found."""
        super().reset()
        self.namespace = f"print/own {self.resets}"

    def add(
        self,
        name: str,
        text: str,
        *,
        answers: bool = True,
        **asked: Any,  # noqa: ANN401  # those of `World.add`
    ) -> Req:
        """Add a request as in `World`. Without `answers`, the remote tier answers when the test calls
        `answer`.
        """
        request = super().add(name, text, **asked)
        asks = self.remote.take_for_catalog()
        self.asked += [Ask(request, keys, self.namespace) for request, keys in asks]
        if answers:
            self.answer()
        return request

    def answer(self) -> None:
        while self.asked:
            self.answer_one(0)

    def answer_one(self, number: int, how: str = "true") -> None:
        """Answer a query: truthfully ("true"), with every key ("lies"), or with a failure ("fails")."""
        ask, last = self.asked.pop(number), len(self.ranks) - 1
        has = [key for key in ask.keys if how == "lies" or (ask.namespace, key, last) in self.store]
        lacks = [key for key in ask.keys if key not in has]
        if how == "fails":
            has, lacks = [], []
        self.tell(facts.TierAnswered(Tier.REMOTE, ask.request, ask.namespace, tuple(has), tuple(lacks)))

    def _remote_store(
        self,
        rank: int,
        job: RemoteJob,
        outcome: CopyOutcome,
        corrupt: tuple[int, ...],
        takes: int | None = None,
    ) -> JobReport:
        """Write values to the remote tier. A call that fails may still have written its values."""
        wrong = [at for at, slot in enumerate(job.slots) if (rank, slot) in self.rotten or at in corrupt]
        right = [at for at in range(len(job.slots)) if at not in wrong]
        taken = right[:takes]
        for at in taken:
            slot = job.slots[at]
            value = Value(self.host[rank][slot], self.host_age[slot])
            self.store.setdefault((job.extra, job.targets[at], rank), value)
        missing = right[len(taken) :]
        if outcome is FAILED:
            wrong, missing = [], list(range(len(job.slots)))
        outcome = CORRUPT if wrong else FAILED if len(missing) == len(right) else DONE
        return JobReport(job.id, job.direction, outcome, 0, 0.0, 0.0, tuple(wrong), missing=tuple(missing))

    def _remote_load(
        self, rank: int, job: RemoteJob, outcome: CopyOutcome, corrupt: tuple[int, ...]
    ) -> JobReport:
        """Read values from the remote tier; copy the valid values into their slots."""
        wrong, missing = list[int](), list[int]()
        for at, (slot, key) in enumerate(zip(job.slots, job.targets, strict=True)):
            value = self.store.get((job.extra, key, rank))
            self.host[rank][slot], self.host_age[slot] = GARBAGE, 0
            self.rotten.discard((rank, slot))
            if value is None or outcome is FAILED:
                missing.append(at)
            elif value.held != key or at in corrupt:
                wrong.append(at)
            else:
                self.host[rank][slot], self.host_age[slot] = value
        outcome = DONE if len(wrong) + len(missing) < len(job.targets) else CORRUPT if wrong else FAILED
        return JobReport(job.id, job.direction, outcome, 0, 0.0, 0.0, tuple(wrong), missing=tuple(missing))

    def in_store(self, text: str, rank: int = 0) -> str:
        """Return one character for each block of a text: "x" if the remote tier has the block, otherwise "."."""
        namespace = self.remote.namespace
        keys = keys_of(text, self.groups[0])
        return "".join("x" if (namespace, key, rank) in self.store else "." for key in keys)

    def share(self, text: str) -> None:
        """Serve a text twice, so that its blocks are written to the remote tier."""
        self.serve("first", text)
        self.serve("again", text)
        for _ in range(10):
            self.copy_all()


class TieredWorld(DiskWorld, RemoteWorld):
    """A world with both a disk and a remote tier."""
