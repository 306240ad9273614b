"""Runs conversations on the reference engine in simulated time, with aborts, preemptions, resets and failing
copies.

The test controls the clock, so an hour passes as fast as the machine computes it. Every copy ends: a copy
that never ends keeps its memory quarantined forever, as designed, and this would count as growth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvoffload.core.tally import MissMemory
from kvoffload.engine import SamplingParams, TokenStream
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Direction
from kvoffload.testing import FakeClock
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import Fence, TicketState
from kvoffload.transfer.runs import CopyRuns
from tests.engine.tiny import assert_same, taken
from tests.reference import rig
from tests.soak.growth import Reading, read

KIND = "sliding_window"  # a model with two groups: sliding windows and full attention
STEP_S = 0.25
_PEOPLE = 12
_THINK_S = 8.0
_LONGEST = 100  # a conversation with more tokens is replaced by a new one
_CHECKED = 25  # every 25th answer is compared with the answer of an engine without offloading
_MISSES = 2000  # the size of `MissMemory`, small enough to fill up during the warm-up


class SlowTicket:
    """A copy that ends at a given time."""

    is_started = True

    def __init__(self, runs: CopyRuns, clock: FakeClock, seconds: float, *, fails: bool) -> None:
        self._runs: CopyRuns | None = runs
        self._clock = clock
        self._end_s = clock.monotonic() + seconds
        self._fails = fails
        self.copy_seconds = seconds

    def query(self) -> TicketState:
        if self._clock.monotonic() < self._end_s:
            return TicketState.PENDING
        if self._fails:
            return TicketState.FAILED
        if self._runs is not None:
            copy_by_memmove(self._runs)
            self._runs = None
        return TicketState.DONE


class SlowCopier:
    """Makes real copies. One in fifty fails, and one in fifty takes half of the timeout."""

    def __init__(self, clock: FakeClock, choose: random.Random) -> None:
        self._clock = clock
        self._choose = choose
        # The rig checks copies that are held open; this copier holds none.
        self.open_tickets: Sequence[Any] = ()

    def fence(self) -> Fence:
        return None

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> SlowTicket:
        fate = self._choose.random()
        seconds = rig.TIMEOUT_S / 2 if fate > 0.98 else 0.03
        return SlowTicket(runs, self._clock, seconds, fails=fate < 0.02)

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class SoakRig(rig.Rig):
    def _make_copier(self, rank: Rank) -> Any:  # noqa: ANN401  # stands in for the rig's own
        copier: Any = SlowCopier(self.clock, random.Random(rank))
        self.copiers.append(copier)
        return copier


@dataclass
class Person:
    history: tuple[int, ...] = ()
    next_s: float = 0.0
    stream: TokenStream | None = None
    tokens: int = 0


@dataclass
class Soak:
    made: SoakRig
    choose: random.Random
    people: list[Person] = field(default_factory=lambda: [Person() for _ in range(_PEOPLE)])
    answers: int = 0
    aborts: int = 0
    resets: int = 0
    checked: int = 0

    def pass_time(self, until_s: float) -> None:
        """Serve until this time, and then until no request and no copy is open."""
        clock = self.made.clock
        while clock.monotonic() < until_s:
            self._talk(clock.monotonic())
            self._disturb()
            self.made.engine.step()
            self.made.pass_time(STEP_S)
            if not self.made.engine.has_work:
                self._listen()
                self.made.pass_time(max(min(one.next_s for one in self.people) - clock.monotonic(), 0.0))
        self.made.drain()
        self._listen()

    def _talk(self, now: float) -> None:
        self._listen()
        for one in self.people:
            if one.stream is None and now >= one.next_s:
                if not one.history or len(one.history) > _LONGEST:
                    # There are three possible beginnings, so that conversations share prefixes.
                    one.history = rig.text(self.choose.randrange(3), 12)
                said = tuple(self.choose.choices(range(64), k=self.choose.randint(3, 12)))
                one.history, one.tokens = (*one.history, *said), self.choose.randint(2, 8)
                one.stream = self.made.engine.submit(one.history, SamplingParams(one.tokens))

    def _listen(self) -> None:
        for one in self.people:
            if one.stream is None or one.stream.stats.finished_s is None:
                continue
            answer = taken(one.stream)
            self.answers += 1
            if self.answers % _CHECKED == 0:
                right = rig.plain.__wrapped__(KIND, one.history, one.tokens)
                assert_same(answer, right[: len(answer)], rig.TOLERANCE)
                self.checked += 1
            one.history += tuple(token.token_id for token in answer)
            one.stream = None
            one.next_s = self.made.clock.monotonic() + self.choose.expovariate(1 / _THINK_S)

    def _disturb(self) -> None:
        fate = self.choose.random()
        engine, running = self.made.engine, [one.stream for one in self.people if one.stream is not None]
        if fate < 0.003 and running:
            engine.abort(self.choose.choice(running).request_id)
            self.aborts += 1
        elif fate < 0.006 and running:
            engine.preempt(self.choose.choice(running).request_id)
        elif fate < 0.008:
            engine.reset_prefix_cache()
            self.resets += 1


def soak(seconds: float, apart_s: float, reported: Callable[[str], object]) -> tuple[list[Reading], str]:
    """Run the soak for this much simulated time; return one reading per `apart_s`, and a summary."""
    made = SoakRig(KIND, num_blocks=90, host_blocks=150, max_requests=8)
    made.offload.core.state.misses = MissMemory(_MISSES)
    traffic, readings = Soak(made, random.Random(1)), list[Reading]()
    try:
        while made.clock.monotonic() < seconds:
            traffic.pass_time(made.clock.monotonic() + apart_s)
            made.check()
            readings.append(read(made.offload.gauges()))
            reported(f"{made.clock.monotonic() / 60:.0f} virtual minutes, {traffic.answers} answers")
        made.assert_clean()
        counts = made.counts()
        words = (
            f"{seconds / 60:.0f} virtual minutes on the reference engine: {traffic.answers} answers, "
            f"{traffic.checked} of them compared, {traffic.aborts} aborts, {traffic.resets} resets, "
            f"{counts.count('kvoffload_load_blocks_total', 'loaded')} blocks loaded, "
            f"{counts.count('kvoffload_load_blocks_total', 'failed')} of failed loads"
        )
    finally:
        made.close()
    return readings, words
