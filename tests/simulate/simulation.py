"""Runs one seed: engine, plugin, coroutines, observers and clients share one loop. Checks the invariants."""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import anyio.to_thread

from kvoffload.bus.feed import run_observer
from kvoffload.engine import Engine
from kvoffload.logs import ROOT
from kvoffload.model.causes import StoreOutcome
from kvoffload.model.events import Event, TierCopyEnded, TierReady
from kvoffload.model.facts import Fact, JobOverdue, TierOpened
from kvoffload.model.wire import Tier
from kvoffload.telemetry.journal import line_of
from kvoffload.transfer.ports import Clocks
from kvoffload_reference.plugin import ReferencePlugin
from tests.conservation import conservation, slot_problems
from tests.core.audit import audit
from tests.core.world import left_behind
from tests.reference.rig import assert_exclusive
from tests.simulate.copier import ChaosCopier
from tests.simulate.counting import CountingRunner, expected
from tests.simulate.disk import DiskPortal, SimDisk, in_place_of_os
from tests.simulate.loop import SimClock, SimLoop, SimPortal, Stuck
from tests.simulate.scenario import Scenario, draw, with_plugin
from tests.simulate.store import Awaited, SimStore, in_place_of_clients
from tests.simulate.traffic import Conversation, Operator, turn

if TYPE_CHECKING:
    from kvoffload.model.ids import Rank
    from kvoffload.runtime.scheduler_side import SchedulerSide

_MOST_STEPS = 4_000  # the limit on steps, many times more than the longest run has
_MOST_LAST_STEPS = 60
_BASE_TOKENS = 20
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Simulation:
    """The simulation of one seed. `run` returns after everything has ended without errors, or raises.

    Args:
        scenario: the random choices of the seed.
        keep: receives every line of a complete journal.
        folder: the folder for the journal's file, if the scenario has a journal.
        copier: the class of each rank's copier.
        disk, store: the lower tiers, or None. If there is a lower tier, engines are killed, and later engines
            start with the tier's contents.
    """

    def __init__(
        self,
        scenario: Scenario,
        keep: Callable[[str], object] | None = None,
        folder: Path | None = None,
        copier: type[ChaosCopier] = ChaosCopier,
        disk: SimDisk | None = None,
        store: SimStore | None = None,
    ) -> None:
        self.scenario = scenario
        self._copier, self._keep, self._folder, self._disk, self._store = copier, keep, folder, disk, store
        draws = scenario.draws
        self.loop = SimLoop(draws("order") if scenario.is_shuffled else None)
        self._time = draws("time")
        self._switches = draws("switches")
        self.steps = self.requests = self.life = self._abandoned = 0
        self.copies_below = Counter[str]()
        self._namespaces: dict[str, None] = {}
        self._reset_namespaces: dict[str, int] = {}
        self._left_namespaces: dict[str, None] = {}  # namespaces that this engine used before its resets
        self._is_stepping = self._is_over = False
        self._complaints: list[str] = []
        self.loop.set_exception_handler(self._complain)
        self.is_open, self._is_up, self._is_dying = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._reading: dict[asyncio.Task[None], None] = {}
        self._end, self._was_reset = "", False
        # Late copies of killed engines may still write to their memory, so it is not freed.
        self._killed: list[object] = []
        self._start()
        self._texts = [
            [draws(f"text {base}").randrange(5) + 5 * place for place in range(_BASE_TOKENS)]
            for base in range(scenario.bases)
        ]

    def _start(self) -> None:
        """Start the first engine, or the next one after a kill."""
        self.copiers: list[ChaosCopier] = []
        now, scenario = self.loop.time, self.scenario
        if self._disk is None and self._store is None:
            self.portal = SimPortal(self.loop)
        else:
            self.portal = DiskPortal(self.loop, scenario.draws(f"threads {self.life}"), self._complaints)
            Awaited.portal = self.portal
        self.plugin = ReferencePlugin(
            portal=self.portal,
            clocks=Clocks(now, now),
            clock=SimClock(self.loop),
            make_copier=self._make_copier,
        )
        make_runner = partial(CountingRunner, computing=self._compute)
        settings: dict[str, object] = {}
        if self._folder is not None:
            settings["journal_path"] = self._folder / f"journal{self.life}"
        if self._disk is not None:
            settings["disk_path"] = self._disk.root
        self.engine = Engine(
            with_plugin(scenario.engine, settings), self.plugin, clock=now, make_runner=make_runner
        )
        if self._keep is not None:
            self._follow(self._keep)
        # the bus counts these facts even after the core has raised
        self.offload.bus.count(JobOverdue, self._note_overdue)
        self.offload.bus.count(TierCopyEnded, self._note_copy_below)
        self.offload.bus.count(TierOpened, self._check_namespace)
        self.offload.bus.count(TierReady, partial(self._check_opened, was_reset=self._was_reset))
        self._was_reset = False
        for name in scenario.observers:
            self._observe(name)
        self._is_up.set()
        self.is_open.set()

    # -- used by the traffic --------------------------------------------------------------------------------------

    @property
    def offload(self) -> SchedulerSide:
        assert self.plugin.offload is not None
        return self.plugin.offload

    @property
    def runner(self) -> CountingRunner:
        assert isinstance(self.engine.runner, CountingRunner)
        return self.engine.runner

    @property
    def has_lost_blocks(self) -> bool:
        """Whether copies were abandoned. The device may then have too few blocks for a request."""
        return self._abandoned > 0

    @property
    def is_cut_off(self) -> bool:
        """Whether the core has raised. If so, its records cannot be checked (R12)."""
        return self.offload.faults.error is not None

    @property
    def disk(self) -> SimDisk:
        assert self._disk is not None
        return self._disk

    @property
    def store(self) -> SimStore:
        assert self._store is not None
        return self._store

    @property
    def has_lives(self) -> bool:
        """Whether engines are killed and replaced."""
        return isinstance(self.portal, DiskPortal)

    def is_ending(self, life: int) -> bool:
        """Return whether this engine has been killed or is about to be."""
        return self.life != life or bool(self._end)

    async def reading(self, read: Coroutine[object, object, None]) -> None:
        """Read a stream to its end, or until the engine ends."""
        if not self.has_lives:
            await read
            return
        task = self.loop.create_task(read)
        self._reading[task] = None
        try:
            await task
        finally:
            task.cancel()
            self._reading.pop(task)

    def reset(self) -> None:
        """Reset the caches, and record the namespaces in which engines may no longer find blocks."""
        self.engine.reset_prefix_cache()
        replaced = self._store.replaced if self._store is not None else 0
        self._was_reset |= self.offload._tiers.reset() and self.offload.disk_identity is not None
        self._reset_namespaces |= dict.fromkeys(self._namespaces, replaced)
        self._left_namespaces |= self._namespaces

    def end_life(self, how: str) -> None:
        self.is_open.clear()
        self._is_up.clear()
        self._end = how
        for task in self._reading:
            task.cancel()
        self._is_dying.set()

    def text(self, base: int) -> Sequence[int]:
        return self._texts[base]

    def expected(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        groups = self.engine.facts.groups
        tensors = self.engine.config.model.layers_per_group
        return expected(groups, tensors, prompt, new_tokens, self.runner.weights)

    async def turn(self, prompt: list[int], new_tokens: int, patience: float | int | None) -> None:
        self.requests += 1
        await turn(self, prompt, new_tokens, patience)

    def _follow(self, keep: Callable[[str], object]) -> None:
        """Pass every message to `keep`, as a line of a journal."""
        numbers = count(1)

        def write(message: object) -> None:
            keep(line_of((next(numbers), self.loop.time(), message)))

        for cls in (*Fact.__subclasses__(), *Event.__subclasses__()):
            self.offload.bus.count(cls, write)

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run(self.loop.create_task(self._play()))
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._is_over = True
            self._close()
        if self._complaints:
            raise AssertionError("; ".join(self._complaints))

    def _run(self, play: asyncio.Task[None]) -> None:
        """Run the loop to the end. Engines are killed and started between two turns of the loop."""
        while self.has_lives and not play.done():
            self._is_dying.clear()
            dying = self.loop.create_task(self._is_dying.wait())
            self.loop.run_until_complete(asyncio.wait([play, dying], return_when=asyncio.FIRST_COMPLETED))
            dying.cancel()
            if self._end:
                self._restart()
        self.loop.run_until_complete(play)

    def _restart(self) -> None:
        assert isinstance(self.portal, DiskPortal)
        self._check()
        self._namespaces.clear()
        self._left_namespaces.clear()
        old = self.engine
        if self._end == "stop":
            self.engine.close()
        self.portal.kill()
        for copier in self.copiers:
            copier.die()
        if self._disk is not None:
            self._disk.process_dies()
            if self._end == "power fails":
                self._disk.power_fails()
            self._disk.is_gone = False
        self._killed += [old, self.plugin]
        self._end = ""
        self.life += 1
        self._start()
        old._wake.set()

    async def _play(self) -> None:
        async with asyncio.TaskGroup() as group:
            stepping = group.create_task(self._step_on())
            async with asyncio.TaskGroup() as traffic:
                traffic.create_task(Operator(self).run())
                for number in range(self.scenario.conversations):
                    traffic.create_task(Conversation(self, number).run())
            if self.has_lives:
                await self._live_again()
            await self._settle()
            await self._ask_all()
            await self._settle()
            if self.engine.config.model.attention == "recurrent":
                await self._check_states_after_reset()
            stepping.cancel()
        self._check_nothing_left()

    async def _ask_all(self) -> None:
        for base in range(self.scenario.bases):
            await self.turn(list(self.text(base)), 3, None)

    async def _live_again(self) -> None:
        """Up to three times: let lookups hit, so that blocks are spilled, then replace the engine."""
        draws = self.scenario.draws("lives")
        for how in draws.choices(["kill", "kill", "power fails", "stop"], k=draws.randint(1, 3)):
            if self._store is not None and draws.random() < 0.8:
                self._store.comes_back()
            await self._ask_all()
            await self._ask_all()
            await self.until(lambda: not self.engine.has_work)
            # The index is written ten times a second, so the engine ends before or after a write.
            await asyncio.sleep(draws.choice([0.0, 0.3, 0.3, 3.0]))
            if draws.random() < 0.2:
                self.reset()
            self.end_life(how)
            await self.is_open.wait()
            for _ in range(10):  # the new engine reads the index during these steps
                await asyncio.sleep(draws.random() * self.scenario.timeout_s)
                self.step()

    async def _settle(self) -> None:
        """End everything except hanging copies. Then release the hanging copies, which report late ends."""
        await self.until(lambda: not self.engine.has_work)
        self._check_drained()
        self._release()
        # An idle engine notices ended copies only in its next step, and these may start more spills.
        for number in range(_MOST_LAST_STEPS):
            await asyncio.sleep(self.scenario.timeout_s / 3)
            self.step()
            if number >= 3 and not (self.engine.has_work or self.offload.core.state.jobs.open):
                break
        self._check_nothing_left()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(self.scenario.timeout_s / 10)

    async def _step_on(self) -> None:
        idle = 0
        while True:
            await self._is_up.wait()
            if not self.engine.has_work:
                self.engine._wake.clear()
                await self.engine._wake.wait()
            if not self._is_up.is_set():
                continue
            idle = 0 if self.step() else idle + 1
            await self._pause(idle)

    async def _pause(self, idle: int) -> None:
        """Run the loop between two steps: not at all, for a few turns, or for a random time."""
        if idle:
            await asyncio.sleep(min(0.0005 * 2 ** min(idle, 20), self.scenario.timeout_s / 5))
            return
        match self._time.randrange(4):
            case 0:
                await asyncio.sleep(0.0)
            case 1:
                for _ in range(self._time.randint(2, 12)):
                    await asyncio.sleep(0)
            case 2:
                await asyncio.sleep(self._time.uniform(0, 0.002))

    def step(self) -> bool:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise AssertionError(f"not drained after {_MOST_STEPS} steps: {self.engine.statistics()}")
        self._is_stepping = True
        try:
            has_computed = self.engine.step()
        finally:
            self._is_stepping = False
            self.engine._wake.set()  # the engine's task may sleep although there is work
        self._check()
        return has_computed

    def _switch(self) -> None:
        """Let the engine's thread run while the coroutine calls the copier."""
        if self._is_stepping or self._is_over or not self.scenario.switch or not self._is_up.is_set():
            return
        if self._switches.random() < self.scenario.switch and self.engine.has_work:
            self.step()

    def _compute(self) -> None:
        self.loop.jump(self._time.random() * self.scenario.step_s)

    def _make_copier(self, rank: Rank) -> ChaosCopier:
        assert rank == len(self.copiers)
        draws, odds = self.scenario.draws(f"copier {rank}"), self.scenario.odds[rank]
        self.copiers.append(self._copier(self.loop, draws, odds, self._switch))
        return self.copiers[-1]

    def _observe(self, name: str) -> None:
        feed = self.offload.bus.observe(name, 8)
        for cls in Event.__subclasses__():
            self.offload.bus.count(cls, feed.offer)
        draws = self.scenario.draws(f"observer {name}")

        async def observer(event: Event) -> None:
            await asyncio.sleep(draws.random() * 0.05)
            if name == "raises" and draws.random() < 0.1:
                raise RuntimeError("an observer raises")

        self.portal.spawn(run_observer, feed, observer, lambda name, error: None)

    # -- invariants -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        problems = [*self.runner.wrong, *self.engine.audit()]
        problems += self._store.problems if self._store is not None else ()
        # if the core has raised, the audit's first line only reports that
        problems += self.offload.audit()[1:] if self.is_cut_off else audit(self.offload.core)
        if self.steps % 8 == 0:
            problems += slot_problems(self.offload.gauges())
            problems += conservation(self.offload.counters.snapshot())
        if problems:
            raise AssertionError("; ".join(problems))
        cause = self.offload.degraded
        if cause is not None and "break" not in self.scenario.acts:
            raise AssertionError(f"offloading is off: {cause.value}")
        for copier in self.copiers:
            if len(copier.open_tickets) > 1:
                assert_exclusive(copier.open_tickets)  # type: ignore[arg-type]  # it reads what tickets of both kinds have

    def _check_drained(self) -> None:
        """Check that no request is open, and that only abandoned copies still hold memory."""
        self._check()
        core, left = self.offload.core.state, list[str]()
        if not self.is_cut_off:
            left += [f"request {request} is still live" for request in core.requests.live]
            # Jobs on a lower tier may be open: an engine waits at most `disk_drain_s` for a hanging disk.
            open_jobs = [job for job in core.jobs.open.values() if not job.settled and job.tier is Tier.HOST]
            left += [f"job {job.id} is {job.state.name}" for job in open_jobs]
        numbers = self.engine.statistics()
        if numbers.leased_blocks != len(core.leases.counts):
            left.append(f"{numbers.leased_blocks} blocks are leased, {len(core.leases.counts)} for a reason")
        if left:
            raise AssertionError("; ".join(left))

    def _check_nothing_left(self) -> None:
        """Check that everything is back in its initial state (R11)."""
        self._check_drained()
        numbers = self.engine.statistics()
        left = [f"workers still copy for job {job}" for job in self.offload.copies.by_job]
        if numbers.free_blocks != self.engine.pool.usable_blocks:
            left.append(f"{numbers.free_blocks} of {self.engine.pool.usable_blocks} device blocks are free")
        if not self.is_cut_off:
            slots = self.offload.gauges()["kvoffload_slots"]
            used = {state: slots["host", state] for state in ("filling", "pinned", "draining")}
            left += [f"{count} slots are {state}" for state, count in used.items() if count]
            left += [f"{what} are left" for what in left_behind(self.offload.core)]
            left += conservation(self.offload.counters.snapshot(), drained=True)
        if left:
            raise AssertionError("; ".join(left))

    def _note_copy_below(self, event: TierCopyEnded) -> None:
        self.copies_below[f"{event.tier.value} {event.direction.value} {event.outcome.value}"] += event.blocks

    def _check_namespace(self, fact: TierOpened) -> None:
        """Check that no engine uses a namespace from before a reset (R18)."""
        name = fact.namespace
        if name in self._left_namespaces or self.store.replaced > self._reset_namespaces.get(name, inf):
            self._complaints.append(f"{name} is used, although it is from before a reset")
        self._namespaces[name] = None

    def _check_opened(self, event: TierReady, *, was_reset: bool) -> None:
        """Check that no block from before a reset is found (R18).

        Such a block may be found only if the disk falsely reported a write or a sync as done.
        """
        self.copies_below["restored"] += event.blocks
        if was_reset and event.blocks and not self.disk.has_lied:
            self._complaints.append(f"{event.blocks} blocks from before a reset are found")

    async def _check_states_after_reset(self) -> None:
        """Check that states computed after a reset can be stored."""
        self.reset()
        before = self._outcomes(StoreOutcome.BEFORE_RESET)
        for _ in range(2):
            await self.turn(list(self.text(0)), 1, None)
            await self._settle()
            self.engine.pool.reset_prefix_cache()
        if refused := self._outcomes(StoreOutcome.BEFORE_RESET) - before:
            raise AssertionError(f"{refused} blocks are taken for blocks from before the reset")

    def _outcomes(self, outcome: StoreOutcome) -> int:
        return self.offload.counters.snapshot().count("kvoffload_store_blocks_total", outcome.value)

    def _note_overdue(self, fact: JobOverdue) -> None:
        self._abandoned += 1

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._is_over:
            self._complaints.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _close(self) -> None:
        self._release()
        with suppress(Stuck):
            self.engine.close()
        if isinstance(self.portal, DiskPortal):
            self.portal.kill()
            SimPortal.close(self.portal)
        if self._disk is not None:
            self._disk.process_dies()
        self.loop.close()

    def _release(self) -> None:
        """End hanging calls, and cause no more faults."""
        for copier in self.copiers:
            copier.release()
        for below in (self._disk, self._store):
            if below is not None:
                below.heals()
        if isinstance(self.portal, DiskPortal):
            self.portal.release()


def simulate(seed: int, journal: Path | None = None, copier: type[ChaosCopier] = ChaosCopier) -> Simulation:
    """Run one seed; return the simulation with its counts. A complete journal does not influence the run.

    Raises:
        Exception: a rule was broken.
    """
    scenario = draw(seed)
    with ExitStack() as stack:
        stack.enter_context(_quiet(not scenario.is_logged))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if scenario.has_journal else None
        stack.enter_context(slow_disk(scenario, is_full=scenario.has_full_disk))
        disk = None
        if scenario.disk is not None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_MEMORY)))
            disk = SimDisk(root / "disk", scenario.draws("calls on the disk"), scenario.disk)
            stack.enter_context(in_place_of_os(disk))
        store = None
        if scenario.store is not None:
            store = SimStore(scenario.draws("calls on the store"), scenario.store)
            stack.enter_context(in_place_of_clients(store))
        keep = None
        if journal is not None:
            file = stack.enter_context(journal.open("w", encoding="utf-8"))
            keep = partial(print, file=file)
        simulation = Simulation(scenario, keep, folder, copier, disk, store)
        simulation.run()
    return simulation


@contextmanager
def slow_disk(scenario: Scenario, *, is_full: bool) -> Iterator[None]:
    """Delay the writes of the journal. If `is_full`, some writes fail."""
    draws = scenario.draws("disk")

    async def run_sync(call: Callable[..., Any], *args: object) -> object:
        await asyncio.sleep(draws.random() * 0.02)
        if is_full and draws.random() < 0.1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return call(*args)

    with mock.patch.object(anyio.to_thread, "run_sync", run_sync):
        yield


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    """Drop log lines. If `is_quiet`, do not even format them."""
    logger = logging.getLogger(ROOT)
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    logger.setLevel(logging.CRITICAL + 1 if is_quiet else logging.DEBUG)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
