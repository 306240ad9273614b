"""A copier with random faults: late, failing, torn, refused and hanging copies. Bytes are copied at random times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.model.errors import CopyError
from kvoffload.model.wire import Direction
from kvoffload.transfer.host_copier import copy_by_memmove
from kvoffload.transfer.ports import TicketState
from kvoffload.transfer.runs import CopyRuns

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from kvoffload.transfer.ports import Fence
    from tests.simulate.loop import SimLoop


@dataclass(frozen=True)
class Odds:
    """The probabilities of a rank's faults. Times are in seconds."""

    fail: float = 0.0  # nothing is copied, and the ticket reports a failure
    tear: float = 0.0  # a part is copied, and the ticket reports a failure
    explode: float = 0.0  # querying the ticket raises
    refuse: float = 0.0  # submitting raises, and no copy is started
    no_fence: float = 0.0  # recording the fence raises
    hang: float = 0.0  # the copy ends only when the run is over
    late: float = 0.0  # the copy takes about as long as the timeout, or twice as long
    usual_s: float = 0.001  # the maximum duration of a copy that is neither late nor hanging
    timeout_s: float = 1.0  # the timeout that `late` refers to
    in_order: bool = True  # whether batches of one direction end in the order of submission, as on a stream


def fate_of(draws: random.Random, odds: object, fates: Sequence[str]) -> str:
    """Draw one of these fates, each with its probability in `odds`, or "done"."""
    left = draws.random()
    for fate in fates:
        left -= getattr(odds, fate)
        if left < 0:
            return fate
    return "done"


class ChaosTicket:
    """One batch. Timers copy its bytes and end the batch, at times chosen when the batch is submitted."""

    is_started = True

    def __init__(self, copier: ChaosCopier, direction: Direction, runs: CopyRuns) -> None:
        self._copier = copier
        self.direction = direction
        self.runs = runs
        self._state = TicketState.PENDING
        self._explodes = False

    @property
    def is_open(self) -> bool:
        return self._state is TicketState.PENDING

    @property
    def copy_seconds(self) -> float | None:
        return None

    def query(self) -> TicketState:
        self._copier.switch()
        if self._explodes and not self.is_open:
            raise CopyError("the copier raises")
        return self._state

    def move(self, pieces: slice) -> None:
        if self.is_open:
            runs = self.runs
            copy_by_memmove(CopyRuns(runs.source[pieces], runs.target[pieces], runs.size[pieces]))

    def end(self, state: TicketState, *, explodes: bool = False) -> None:
        if self.is_open:
            self._state, self._explodes = state, explodes


class ChaosCopier:
    """Copies bytes in host memory, with faults. Calls `switch` where another thread could run."""

    slices = 0

    def __init__(
        self, loop: SimLoop, draws: random.Random, odds: Odds, switch: Callable[[], object] = lambda: None
    ) -> None:
        self._loop = loop
        self._draws = draws
        self.odds = odds
        self.switch = switch
        self.tickets: list[ChaosTicket] = []
        self.is_dead = False
        self._free_at = dict.fromkeys(Direction, 0.0)
        self._hung: set[Direction] = set()

    @property
    def open_tickets(self) -> list[ChaosTicket]:
        self.tickets = [ticket for ticket in self.tickets if ticket.is_open]
        return self.tickets

    def fence(self) -> Fence:
        if self._draws.random() < self.odds.no_fence:
            raise CopyError("no fence")
        return None

    def submit(self, direction: Direction, runs: CopyRuns, fences: Sequence[Fence]) -> ChaosTicket:
        if self._draws.random() < self.odds.refuse:
            raise CopyError("refused")
        ticket = ChaosTicket(self, direction, runs)
        self.tickets.append(ticket)
        self._begin(ticket)
        self.switch()
        return ticket

    def close(self) -> None:
        """Do nothing: a fake copier has no resources."""

    def release(self) -> None:
        """End hanging copies, and cause no more faults, because the run is over."""
        self.odds = Odds()
        self.is_dead = False
        self._hung.clear()
        self._free_at = dict.fromkeys(Direction, 0.0)
        for ticket in self.open_tickets:
            ticket.move(slice(None))
            ticket.end(TicketState.DONE)

    def die(self) -> None:
        """Copy no more bytes: the process has died."""
        for ticket in self.open_tickets:
            ticket.end(TicketState.FAILED)

    def _begin(self, ticket: ChaosTicket) -> None:
        """Choose when the batch's bytes are copied, when the batch ends, and its outcome."""
        odds, draws, direction = self.odds, self._draws, ticket.direction
        fate = self._fate()
        seconds = draws.uniform(0, odds.usual_s) * draws.random()
        if fate == "late":
            seconds = odds.timeout_s * draws.choice([0.9, 1.0, 1.1, 2.0]) + draws.uniform(0, 0.01)
        if fate == "hang" or direction in self._hung:
            if odds.in_order:
                self._hung.add(direction)
            self._move(ticket, 3 * odds.timeout_s, draws.random())
            return
        if odds.in_order:
            seconds = max(seconds, self._free_at[direction] - self._loop.now)
            self._free_at[direction] = self._loop.now + seconds
        share = {"fail": 0.0, "tear": draws.random()}.get(fate, 1.0)
        self._move(ticket, seconds, share)
        state = TicketState.FAILED if fate in ("fail", "tear") else TicketState.DONE
        self._at(seconds, lambda: self._end(ticket, state, share, explodes=fate == "explode"))

    def _fate(self) -> str:
        drawn = fate_of(self._draws, self.odds, ("fail", "tear", "explode", "hang", "late"))
        return "hang" if self.is_dead else drawn

    def _move(self, ticket: ChaosTicket, seconds: float, share: float) -> None:
        """Copy the first `share` of the pieces, in two parts, at random moments before the end."""
        count = round(share * len(ticket.runs))
        middle = self._draws.randint(0, count)
        for part in (slice(0, middle), slice(middle, count)):
            if part.start < part.stop:
                self._at(self._draws.uniform(0, seconds), lambda part=part: ticket.move(part))  # type: ignore[misc]

    def _end(self, ticket: ChaosTicket, state: TicketState, share: float, *, explodes: bool) -> None:
        if share == 1.0:
            ticket.move(slice(None))
        ticket.end(state, explodes=explodes)

    def _at(self, seconds: float, act: Callable[[], object]) -> None:
        if seconds <= 0:
            act()
        else:
            self._loop.call_later(seconds, act)
