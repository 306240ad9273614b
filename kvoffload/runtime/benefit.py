"""Net benefit: prefill seconds saved, minus seconds that requests waited and seconds that copies added to steps.

    saved           loaded tokens times the engine's measured prefill time per token (`PrefillRate`)
    waited          requests' waits: for their own load, for another request's load of the same prefix, or for a fetch
    interference    the time that running copies add to steps (`StepTimes`)

All three are computed from facts and events; an adapter only reports how many tokens a step computes. The results are
estimates, whose limits `kvoffload/telemetry/README.md` describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sized

from msgspec import Struct

from kvoffload.bus.bus import Bus, Tick
from kvoffload.model import events, facts
from kvoffload.model.causes import LoadOutcome, TierOutcome
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import LOWER_TIERS, Direction, Tier
from kvoffload.runtime.break_even import BreakEven, BusyShare
from kvoffload.runtime.copies import OpenCopies
from kvoffload.runtime.step_times import Copies, PrefillRate, StepTimes
from kvoffload.telemetry.catalogue import LoadWait
from kvoffload.telemetry.counters import Histogram

_LEAST_BLOCKS = 4  # the prefill rate is measured over runs of at least this many blocks
_WEIGH_PERIOD_S = 1.0  # seconds between two updates of what a load takes
_PERIOD_S = 60.0  # seconds from one check of the net benefit's sign to the next
_MOVED = 2  # a change of the break-even is reported if it is by at least this factor
_MATTERS = 0.01  # a net benefit becomes negative only if the loss exceeds this share of the period


class _Batch(Struct):
    """The loads that one step plans. They are copied together, so that the copy time of each is that of all."""

    queued_s: float  #: how long the copies before them still took
    tokens: int = 0  #: how many tokens they copy


_ON_HOST = (Tier.HOST,)
_STORING: Copies = (Direction.STORE,)
_LOADING: Copies = (Direction.LOAD,)


class NetBenefit:
    """Adds up the seconds saved and lost, on the engine's thread. Any thread may read the public numbers.

    Args:
        block_tokens: the length of the shortest possible hit, in tokens.
        copies: the table of open copies.
        bus: the bus to observe, on which `NetBenefitTurned` is published.
        waits: the histogram of each kind of wait. Without a lower tier, fetches have none.
        requests: the requests that have not ended.
        set_least: called for each tier, with the fewest tokens worth a load (HOST) or worth a fetch and the load after
            it; 0 without measurements. None if the operator has set the length.
    """

    def __init__(
        self,
        block_tokens: int,
        copies: OpenCopies,
        bus: Bus,
        waits: Mapping[LoadWait, Histogram],
        requests: Sized,
        set_least: Callable[[Tier, int], object] | None = None,
    ) -> None:
        self._open = copies
        self._block_tokens = block_tokens
        self._hook = bus.hook
        self._rate = PrefillRate(_LEAST_BLOCKS * block_tokens)
        self._times = StepTimes()
        self._batch: _Batch | None = None  # the loads since the last step
        self._busy = BusyShare()
        self._break_even = {tier: BreakEven() for tier in (Tier.HOST, *LOWER_TIERS)}
        self._requests = requests
        self._set_least = set_least
        self._weigh_due_s = -math.inf
        self._pushed_s = -1.0  # `_computing_s` when the lengths were set; -1 to set them with the next step
        self._usual_tokens = 0
        # For each request that waits, why its first lookup answered "not yet".
        self._deferrals: dict[RequestId, LoadWait] = {}
        # When the open load of each request was planned, how many tokens it copies, and its batch.
        self._loads: dict[RequestId, tuple[float, int, _Batch]] = {}
        # When each open fetch for a request was planned, and how many tokens it copies.
        self._fetches: dict[JobId, tuple[float, int]] = {}
        self._open_tokens = 0  # of the open loads
        self._unpriced_tokens = 0
        self.saved_s = 0.0
        self._waits = waits
        self.interference_s = dict.fromkeys(Direction, 0.0)
        self._last_s = 0.0  # when the last step was scheduled
        self._ran = False  # whether the last step computed anything
        self._is_calm = False  # whether the last step only decoded
        self._is_steady = False  # whether the last two steps only decoded, with the same directions of copies
        self._decoded = 0  # how many tokens the last step decoded
        self._copies: Copies = ()  # the directions of the copies that ran during the last step
        # The steps to measure: how long each took, how many tokens it decoded, the directions of its copies, and
        # whether it can be compared with others. Measuring many at once takes much less time than one in each step.
        self._unmeasured: list[tuple[float, int, Copies, bool]] = []
        self._period_began = self._judge_s = -math.inf
        self._period_net_s = 0.0
        self.is_negative = False
        self._bus = bus
        bus.count(facts.StepScheduled, self._step)
        bus.count(Tick, self._measure)
        bus.count(events.RequestsEnded, self._idle)
        bus.count(events.LookupDeferred, self._deferred)
        bus.count(events.WaitEnded, self._waited)
        bus.count(events.LoadScheduled, self._load_scheduled)
        bus.count(events.LoadOrphaned, self._load_orphaned)
        bus.count(events.LoadEnded, self._load_ended)
        bus.count(events.TierCopyScheduled, self._fetch_scheduled)
        bus.count(events.TierCopyEnded, self._fetch_ended)
        if set_least is not None:
            bus.count(facts.RequestSeen, self._seen)

    @property
    def waited_s(self) -> float:
        """Return the seconds that requests have waited for loads and fetches."""
        return sum([wait.total for wait in self._waits.values()])

    @property
    def net_s(self) -> float:
        """Return the seconds saved minus the seconds lost since the engine's start."""
        return self.saved_s - self.waited_s - sum(self.interference_s.values())

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the prefill rate in tokens per second; 0 until measured."""
        rate = self._rate.seconds_per_token
        return 1 / rate if rate else 0.0

    def break_even(self) -> dict[Tier, int]:
        """Return the break-even lengths in tokens, of loads (HOST) and of fetches from each tier; 0 until measured."""
        now, computing_s = self._hook.now, self._computing_s()
        for each in self._break_even.values():
            each.weigh()
        return {
            tier: each.tokens(now, computing_s, self._then(tier)) for tier, each in self._break_even.items()
        }

    # -- steps ------------------------------------------------------------------------------------------------------

    def _idle(self, _: events.RequestsEnded) -> None:
        """End the measurement of the last step. An idle engine's next tick may be far away."""
        if self._ran:
            now = self._hook.now
            self._rate.idle(now)
            self._end_step(now)
            self._ran = self._is_calm = self._is_steady = False
            self._decoded = 0
            if self._set_least is not None:
                self._push_least(self._break_even)
        self._measure()

    def _seen(self, _: facts.RequestSeen) -> None:
        """Set the lengths for the first request after a pause, in which the measurements may have expired."""
        if len(self._requests) == 1:
            self._push_least(self._break_even)

    def _step(self, fact: facts.StepScheduled) -> None:
        now = self._hook.now
        prefill, decode = fact.prefill_tokens, fact.decode_tokens
        copies = self._copying() if self._open.oldest is not None else ()
        # Inlined, for speed: in a row of decode-only steps, each step makes only one Python call.
        is_calm = decode > 0 and not prefill
        if self._is_steady or (self._ran and self._copies):
            self._end_step(now)
        if prefill or self._rate.is_timing:
            self._measure()
            usual_s = self._times.usual_s(decode) if prefill or decode else 0.0
            self._rate.step(now, prefill, usual_s)
        self._is_steady = is_calm and self._is_calm and copies == self._copies
        self._is_calm = is_calm
        self._copies = copies
        self._decoded = decode
        self._ran = is_calm or prefill > 0
        self._last_s = now
        if now >= self._weigh_due_s:
            self._weigh(now)
        self._busy.tokens += prefill
        self._batch = None
        if self._set_least is not None and (self._loads or self._computing_s() != self._pushed_s):
            self._push_least(self._break_even)
        if now >= self._judge_s:
            self._judge(now)

    def _push_least(self, tiers: Iterable[Tier]) -> None:
        """Set the fewest tokens worth a load or a fetch, with the requests that now wait and the loads that are open."""
        assert self._set_least is not None
        now, computing_s = self._hook.now, self._computing_s()
        self._pushed_s = computing_s
        for tier in tiers:
            self._set_least(tier, self._break_even[tier].least(now, computing_s, self._then(tier)))

    def _computing_s(self) -> float:
        """Return the seconds by which computing a token delays requests without a token, all together.

        Requests that decode, load or wait for a copy are not delayed until they get their first token.
        """
        others = self._decoded + len(self._loads) + len(self._deferrals)
        waiting = max(len(self._requests) - others - 1, 0)  # besides the request to decide about
        return self._rate.seconds_per_token * (waiting + self._busy.delayed)

    def _then(self, tier: Tier) -> BreakEven | None:
        """Return the measurements of the copies that follow those from a tier."""
        return None if tier is Tier.HOST else self._break_even[Tier.HOST]

    def _end_step(self, now: float) -> None:
        self._unmeasured.append((now - self._last_s, self._decoded, self._copies, self._is_steady))

    def _measure(self, _: Tick | None = None) -> None:
        """Measure the steps that ended since the last call, and add the time that copies added to them."""
        ended, self._unmeasured = self._unmeasured, []
        for seconds, decoded, copies, is_steady in ended:
            if is_steady:
                self._times.observe(seconds, decoded, copies)
            if copies and (slower := self._times.slowdown(copies)):
                lost = seconds * slower / (1 + slower)
                for way in copies:
                    self.interference_s[way] += lost / len(copies)

    # -- loads ------------------------------------------------------------------------------------------------------

    def _deferred(self, event: events.LookupDeferred) -> None:
        self._deferrals.setdefault(event.request, LoadWait(event.reason.value))

    def _waited(self, event: events.WaitEnded) -> None:
        if (reason := self._deferrals.pop(event.request, None)) is not None:
            self._waits[reason].observe(event.seconds)

    def _load_scheduled(self, event: events.LoadScheduled) -> None:
        now, tokens = self._hook.now, event.tokens
        queued_s = self._break_even[Tier.HOST].scheduled(now, tokens)
        if self._batch is None:
            self._batch = _Batch(queued_s)
        self._batch.tokens += tokens
        self._open_tokens += tokens
        self._loads[event.request] = now, tokens, self._batch
        if self._set_least is not None:
            self._push_least(_ON_HOST)  # other requests may be looked up before the next step

    def _load_orphaned(self, event: events.LoadOrphaned) -> None:
        """Add a request's wait for its load until now, and ignore the load's end."""
        if (load := self._loads.pop(event.request, None)) is not None:
            planned, tokens, _ = load
            self._open_tokens -= tokens
            self._waits[LoadWait.OWN_LOAD].observe(self._hook.now - planned)

    def _load_ended(self, event: events.LoadEnded) -> None:
        load = self._loads.pop(event.request, None)
        if load is None:
            return
        planned, tokens, batch = load
        now, loads = self._hook.now, self._break_even[Tier.HOST]
        waited_s = now - planned
        self._waits[LoadWait.OWN_LOAD].observe(waited_s)
        self._open_tokens = self._open_tokens - tokens if self._loads else 0
        loads.ended(now, self._open_tokens)
        if event.outcome is LoadOutcome.LOADED:
            self._unpriced_tokens += tokens
            loads.loaded(now, batch.tokens, waited_s - batch.queued_s, event.copy_s)
            self._price()
        if self._set_least is not None:
            self._push_least(_ON_HOST)  # other requests may be looked up before the next step

    def _fetch_scheduled(self, event: events.TierCopyScheduled) -> None:
        if event.tokens:
            self._fetches[event.job] = self._hook.now, event.tokens
            # Fetches run in parallel, so the waits for each other are in their measured times.
            self._break_even[event.tier].scheduled(self._hook.now, 0)

    def _fetch_ended(self, event: events.TierCopyEnded) -> None:
        fetch = self._fetches.pop(event.job, None)
        if fetch is not None and event.outcome is TierOutcome.DONE:
            planned, tokens = fetch
            waited_s = self._hook.now - planned
            # A rank's threads copy in parallel, so their copy times may add up to more than the wait.
            copy_s = min(event.copy_s, waited_s)
            self._break_even[event.tier].loaded(self._hook.now, tokens, waited_s, copy_s)

    def _price(self) -> None:
        """Add the prefill time of loaded tokens to `saved_s`, as soon as the prefill rate is known."""
        rate = self._rate.seconds_per_token
        self.saved_s += self._unpriced_tokens * rate
        if rate:
            self._unpriced_tokens = 0

    def _weigh(self, now: float) -> None:
        self._weigh_due_s = now + _WEIGH_PERIOD_S
        self._busy.update(now, self._rate.seconds_per_token)
        for each in self._break_even.values():
            each.weigh()
        self._pushed_s = -1.0

    def _copying(self) -> Copies:
        stores = _STORING if self._open.count(Direction.STORE, is_overdue=False) else ()
        return stores + (_LOADING if self._open.count(Direction.LOAD, is_overdue=False) else ())

    # -- sign changes -----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """End a period. Publish what has changed: the sign of the net benefit, or by far the usual break-even."""
        if self._set_least is not None:
            self._judge_break_even()
        self._price()
        self._measure()
        net = self.net_s
        gained = net - self._period_net_s
        self._period_net_s = net
        began, self._period_began = self._period_began, now
        self._judge_s = now + _PERIOD_S
        turned = gained > 0 if self.is_negative else gained < -_MATTERS * _PERIOD_S
        if turned and began > -math.inf:
            self.is_negative = not self.is_negative
            self._bus.publish(events.NetBenefitTurned(self.is_negative, gained, now - began))

    def _judge_break_even(self) -> None:
        load, token_s, delayed = self._break_even[Tier.HOST], self._rate.seconds_per_token, self._busy.delayed
        tokens, was = load.usual_tokens(token_s * delayed), self._usual_tokens
        if max(tokens, was) >= _MOVED * max(min(tokens, was), self._block_tokens):
            self._usual_tokens = tokens
            moved = events.BreakEvenMoved(was, tokens, load.fixed_s, load.token_s, token_s, delayed)
            self._bus.publish(moved)
