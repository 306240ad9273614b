"""Runs the core tests' small engine on a real scheduler side, which is called and timed as by an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import LoadResults, Policy
from kvoffload.model import facts
from kvoffload.model.config import OffloadConfig
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import NOTHING, Direction, TransferPlan
from kvoffload.runtime.copies import NO_ANSWERS
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer.ports import Clocks
from tests.core.world import Copy, Req, World
from tests.settings import make_config

TIMEOUT_S = 30.0
_TURNS = 60  # the limit on an engine's turns in a test, more than twice what any test needs


class SideWorld(World):
    """A world with a scheduler side.

    Bytes, reference counts and answers to loads are checked as in `World`. The core's invariants are checked
    only when the test asks for it, because these tests break them.

    Args:
        groups: the engine's groups.
        config: the operator's settings.
        options: options of `World`.
    """

    def __init__(self, *groups: GroupSpec, config: OffloadConfig | None = None, **options: object) -> None:
        self.config = config or make_config(transfer_timeout_s=TIMEOUT_S)
        self.clock = FakeClock(100.0)
        self.hung: set[JobId] = set()
        self._plan: TransferPlan = NOTHING
        super().__init__(*groups, **options)  # type: ignore[arg-type]  # of several types
        self.checks_each_fact = False

    def _make_core(self, policy: Policy) -> OffloadCore:
        now = self.clock.monotonic
        self.side = SchedulerSide(self.shape, self.config, self.device, clocks=Clocks(now, now))
        return self.side.core

    # -- telling and asking -------------------------------------------------------------------------------------

    def tell(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.StepScheduled):
            self._plan = self.side.step(fact)
        elif isinstance(fact, facts.TransferReported):
            self.side.reported([fact.report])
        elif isinstance(fact, facts.CacheReset):
            self.side.reset()
        elif isinstance(fact, facts.RequestSeen):
            self.side.seen(fact)
        elif isinstance(fact, facts.BlocksAllocated):
            self.side.allocated(fact)
        else:
            assert isinstance(fact, facts.RequestEnded), fact
            self.side.ended(fact)
        self._settle()

    def _settle(self) -> None:
        answers = self.side.take_answers()
        if answers is not NO_ANSWERS:
            self._loads_ended(LoadResults(answers.loaded, answers.failed))

    def lookup(self, request: Req, *, may_wait: bool = True, least: int = 0) -> int | None:
        new_keys = self._new_keys(request)
        answer = self.side.lookup(request.name, self.device_hit(request), len(request.text), new_keys)
        self._settle()
        return answer

    def submit(self) -> TransferPlan:
        plan, self._plan = self._plan, NOTHING
        for job in plan.jobs:
            self.copies[job.id] = Copy(job, set(self.ranks))
        return plan

    def submitted(self, direction: Direction | None = None) -> list[JobId]:
        return [job for job in self.open_jobs(direction) if job not in self.hung]

    # -- an engine's turns --------------------------------------------------------------------------------------

    def turn(self, *, copies_end: bool = True) -> None:
        """Admit waiting requests, run a step, and end all copies that do not hang."""
        for request in tuple(self.requests.values()):
            if request.state == "waiting":
                self.admit(request)
        self.step()
        if copies_end:
            self.end_copies(self.submitted())

    def end_copies(self, jobs: Sequence[JobId]) -> None:
        for job in jobs:
            for rank in sorted(self.copies[job].running):
                self.report(rank, job)

    def hang(self) -> None:
        """Let all running copies hang until they have timed out."""
        self.hung.update(self.copies)
        self.clock.jump(TIMEOUT_S)

    def finish_requests(self, *names: str) -> None:
        """Run these requests (by default all) until each has computed its text, then end them."""
        asked = {name: len(self.requests[name].text) for name in names or tuple(self.requests)}
        for _ in range(_TURNS):
            self.turn()
            for name in [
                name for name in asked if name not in self.requests or self._has_computed(name, asked)
            ]:
                del asked[name]
                if name in self.requests:
                    self.end(self.requests[name])
            if not asked:
                return
        raise AssertionError(f"requests hang: {[self.requests[name] for name in asked]}")

    def _has_computed(self, name: str, asked: dict[str, int]) -> bool:
        request = self.requests[name]
        return request.state == "running" and request.computed >= asked[name]

    def drain(self) -> None:
        """Run steps without requests until the side needs no more steps. No time passes."""
        for _ in range(_TURNS):
            if not self.side.has_work:
                return
            self.idle_step()
            self.end_copies(self.submitted())
        raise AssertionError("the side has work without end")

    # -- what must hold when all has ended ----------------------------------------------------------------------

    def problems_at_end(self) -> list[str]:
        """End all copies, including abandoned copies; return what is still held. The audit is not run."""
        self.drain()
        self.end_copies(list(self.copies))
        self.drain()
        waiting = [f"{name} was never answered" for name in self.requests]
        leased = [f"blocks {sorted(self.device.leased)} are leased"] if self.device.leased else []
        held = [f"blocks {sorted(self.device.held)} are held"] if self.device.held else []
        return [*waiting, *leased, *held, *self.device.problems()]

    def serve_again(self, name: str, text: str) -> None:
        self.add(name, text)
        self.finish_requests(RequestId(name))
