"""Makes each call inside the core, and each call of an observer, raise once on a real scheduler side (R12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import LoadResults, Policy
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome, DegradeCause
from kvoffload.model.config import OffloadConfig
from kvoffload.model.groups import GroupSpec
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import NOTHING, Direction, TransferPlan
from kvoffload.runtime.copies import NO_ANSWERS
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer.ports import Clocks
from tests.core.audit import audit_side
from tests.core.world import CORRUPT, FAILED, Copy, Req, World, full, window
from tests.settings import make_config
from tests.sweep import OBSERVERS, Broken, Place, chosen, places, raising

TEXT = "abcdefghijklm"
TIMEOUT_S = 30.0
_TURNS = 60  # the limit on an engine's turns in a test, more than twice what any test needs


class SideWorld(World):
    """The small engine of the core's tests, on a real scheduler side, which is called and timed as by an adapter.

    Bytes, reference counts and answers to loads are checked as in `World`. The core's invariants are checked
    only when the test asks for it, because these tests break them.
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

    def tell(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.StepScheduled):
            self._plan = self.side.step(fact)
        elif isinstance(fact, facts.TransferReported):
            self.side.reported([fact.report])
        elif isinstance(fact, facts.CacheReset):
            self.side.reset()
        elif isinstance(fact, facts.RequestSeen):
            request = self.requests[fact.request]
            self.side.seen(fact, lambda: request.computed >= len(request.text))
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

    def submitted(self) -> list[JobId]:
        return [job for job in self.open_jobs() if job not in self.hung]

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
        length = {name: len(self.requests[name].text) for name in names or tuple(self.requests)}
        for _ in range(_TURNS):
            self.turn()
            left = [self.requests[name] for name in length if name in self.requests]
            for request in left:
                if request.state == "running" and request.computed >= length[request.name]:
                    self.end(request)
            if not any(name in self.requests for name in length):
                return
        raise AssertionError(f"requests hang: {left}")

    def drain(self) -> None:
        """Run steps without requests until the side needs no more steps. No time passes."""
        for _ in range(_TURNS):
            if not self.side.has_work:
                return
            self.idle_step()
            self.end_copies(self.submitted())
        raise AssertionError("the side has work without end")

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


WORLDS: dict[str, Callable[[], SideWorld]] = {
    "eager": lambda: SideWorld(full(), window(5, group=1), ranks=2, device=52, host=16),
    "lazy": lambda: SideWorld(
        device=20,
        host=12,
        step_tokens=4,
        config=make_config(store_policy="lazy", transfer_timeout_s=TIMEOUT_S),
    ),
}


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """Drop log lines, because these tests would print hundreds of tracebacks."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def live(world: SideWorld) -> None:
    """Run requests, and cause faults of every kind."""
    fill(world, "first")
    a_shared_load_and_an_abort(world)
    for end in (FAILED, CORRUPT, None):
        copies_that_end_badly(world, end)
    a_reset(world)
    an_eviction(world)
    world.finish_requests()


def fill(world: SideWorld, name: str) -> None:
    """Store TEXT on the host, and remove it from the device.

    The lazy planner stores TEXT only after other requests have taken device blocks.
    """
    world.serve_again(name, TEXT)
    for number in range(4 if world.config.store_policy == "lazy" else 0):
        world.serve_again(f"{name}{number}", f"{number} of {name} fills")
    world.drain()
    world.device.forget_keys()


def a_shared_load_and_an_abort(world: SideWorld) -> None:
    for name in ("loads", "shares", "leaves"):
        world.add(name, TEXT)
    for name in ("loads", "shares", "leaves"):
        world.admit(world.requests[name])
    world.step()
    for name in ("loads", "leaves"):
        world.end(world.requests[name])
    world.add("stores", "one more text")
    world.add("also", "one more text")
    world.turn(copies_end=False)
    world.turn(copies_end=False)
    world.end_copies(world.submitted())
    world.finish_requests()
    world.drain()


def copies_that_end_badly(world: SideWorld, end: CopyOutcome | None) -> None:
    """Let a load and a store fail or hang. Preempt the request that stores, and abort the request that loads."""
    fill(world, f"fills{end}")
    for name in (f"again{end}", f"leaves{end}"):
        world.add(name, TEXT)
    world.add(f"new{end}", f"{end} is at the front")
    for _ in range(3):
        world.turn(copies_end=False)
    if end is None:
        world.hang()
    else:
        for job in world.submitted():
            is_corrupt = end is CORRUPT and world.copies[job].job.direction is Direction.LOAD
            world.report(0, job, CORRUPT if is_corrupt else FAILED, (0,) if is_corrupt else ())
    world.turn(copies_end=False)
    if world.requests[f"new{end}"].state == "running":
        world.preempt(world.requests[f"new{end}"])
    world.end(world.requests[f"leaves{end}"])
    world.finish_requests()
    world.end_copies([*world.hung & world.copies.keys()][:1])  # one hanging copy ends late


def a_reset(world: SideWorld) -> None:
    world.add("old", TEXT)
    for _ in range(2):
        world.turn(copies_end=False)
    world.reset()
    world.finish_requests()
    world.serve_again("new", TEXT)


def an_eviction(world: SideWorld) -> None:
    world.add("stays", "stays here" * 2)
    for number in range(3):
        world.serve_again(f"other{number}", f"{number} is another prompt")
    world.device.forget_keys()
    world.serve_again("back", "1 is another prompt")
    world.side.audit()


def trial(make: Callable[[], SideWorld], place: Place) -> list[str]:
    """Return the problems found after the core has raised at this place."""
    world = make()
    try:
        with raising(place):
            live(world)
        problems = world.problems_at_end()
        world.serve_again("last", "a new prompt")
        problems += world.problems_at_end()
    except Exception as error:
        return [repr(error)]
    if world.side.degraded is not DegradeCause.HANDLER_RAISED:
        problems.append("offloading is on")
    if not any(str(place) in line for line in world.side.audit()):
        problems.append(f"the audit says {world.side.audit()}")
    return problems


@pytest.mark.parametrize("name", WORLDS)
def test_without_an_injected_fault_nothing_goes_wrong(name: str) -> None:
    world = WORLDS[name]()
    live(world)
    assert world.problems_at_end() == []
    assert audit_side(world.side) == []
    assert world.side.degraded is None


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_r12_wherever_the_core_raises_loads_are_answered_once_and_nothing_is_leased(name: str) -> None:
    make = WORLDS[name]
    world = make()
    found = places(lambda: live(world))
    assert len(found) > 150
    tried = {place: trial(make, place) for place in chosen(found, every=11)}
    wrong = {str(place): problems for place, problems in tried.items() if problems}
    assert not wrong, f"{len(wrong)} of {len(tried)} places: {wrong}"


def live_and_scraped(world: SideWorld) -> None:
    live(world)
    with suppress(Broken):  # a scrape runs on another thread, where an error does not reach the engine
        world.side.gauges()


def trial_of_observers(make: Callable[[], SideWorld], place: Place) -> list[str]:
    """Return the problems found after an observer has raised at this place."""
    world = make()
    try:
        with raising(place, OBSERVERS):
            live_and_scraped(world)
        problems = world.problems_at_end()
        world.serve_again("last", "a new prompt")
        problems += [*world.problems_at_end(), *audit_side(world.side)]
    except Exception as error:
        return [repr(error)]
    finally:
        world.side.close()
    if world.side.degraded is not None:
        problems.append(f"offloading is off: {world.side.degraded}")
    removed = world.side.counters.snapshot().total("kvoffload_bus_removed_total")
    if removed != 1 and "catalogue.read_all" not in place.function:
        problems.append(f"{removed} observers are counted as removed")
    return problems


@pytest.mark.slow
def test_r12_wherever_an_observer_raises_the_engine_serves_on_and_the_observer_is_counted_as_removed() -> (
    None
):
    config = make_config(transfer_timeout_s=TIMEOUT_S, min_load_tokens="auto")

    def make() -> SideWorld:
        return SideWorld(full(), window(5, group=1), ranks=2, device=52, host=16, config=config)

    world = make()
    found = places(lambda: live_and_scraped(world), OBSERVERS)
    assert len({place.function for place in found}) > 40
    tried = {place: trial_of_observers(make, place) for place in found}
    wrong = {str(place): problems for place, problems in tried.items() if problems}
    assert not wrong, f"{len(wrong)} of {len(tried)} places: {wrong}"
