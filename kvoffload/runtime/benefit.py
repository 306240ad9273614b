"""Net benefit: prefill seconds saved, minus seconds that requests waited and seconds that copies added to steps.

    saved           loaded tokens times the engine's measured prefill time per token (`PrefillRate`)
    waited          requests' waits: for their own load, for another request's load of the same prefix, or for a fetch
    interference    the time that running copies add to steps (`StepTimes`)

All three are computed from facts and events; an adapter only reports how many tokens a step computes. The results are
estimates, whose limits `kvoffload/telemetry/README.md` describes.

A load of n tokens delays its request by `fixed + n * copy`; computing the tokens takes `n * prefill`. The two are equal
at `fixed / (prefill - copy)` tokens, the break-even length. Blocks fetched from a lower tier must still be loaded, so
both delays add up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from kvoffload.bus.bus import Bus
from kvoffload.model import events, facts
from kvoffload.model.causes import LoadOutcome, TierOutcome
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import LOWER_TIERS, Direction, Tier
from kvoffload.runtime.copies import OpenCopies
from kvoffload.runtime.step_times import Copies, PrefillRate, StepTimes
from kvoffload.telemetry.catalogue import LoadWait
from kvoffload.telemetry.counters import Histogram

NEVER_TOKENS = 1_000_000
"""A length longer than any prompt, used when copying is slower than computing at every length."""

# How many recent loads to keep: enough that a burst of loads that delay each other hardly shifts the median.
_LOADS = 31
_STALE_S = 60.0

_LEAST_BLOCKS = 4  # the prefill rate is measured over runs of at least this many blocks
_LEAST_PERIOD_S = 1.0  # seconds between two updates of the break-even lengths
_PERIOD_S = 60.0  # seconds from one check of the net benefit's sign to the next
_MATTERS = 0.01  # a net benefit becomes negative only if the loss exceeds this share of the period


class BreakEven:
    """The break-even length, above which loading is faster than computing, from recent loads or fetches.

    One thread adds loads; any thread may call `weigh` and read `tokens`.
    """

    def __init__(self) -> None:
        # For each load: its fixed seconds, its copy seconds and its tokens.
        self._loads: deque[tuple[float, float, int]] = deque(maxlen=_LOADS)
        self._stale_at = -math.inf
        self.tokens = 0
        """The break-even length; 0 while unknown, at most `NEVER_TOKENS`."""
        self.fixed_s = self.token_s = 0.0
        """Fixed seconds of a load, and further seconds for each token; 0 while unknown."""

    def loaded(self, now: float, tokens: int, waited_s: float, copy_s: float) -> None:
        """Add a load or fetch that succeeded.

        Args:
            now: the time, in monotonic seconds.
            tokens: how many tokens were copied, at least one.
            waited_s: seconds from the copy's scheduling to the report of its end.
            copy_s: seconds that one rank spent copying.
        """
        if now > self._stale_at:
            self._loads.clear()
        self._stale_at = now + _STALE_S
        self._loads.append((max(waited_s - copy_s, 0.0), copy_s, tokens))

    def weigh(self, seconds_per_token: float, then: BreakEven | None = None) -> None:
        """Compute `tokens` from the measurements.

        Args:
            seconds_per_token: prefill seconds per token; 0 if unknown.
            then: for fetches, the measurements of loads, because a load follows each fetch.
        """
        loads = sorted(self._loads)  # a copy, because another thread may add loads
        if not (loads and seconds_per_token):
            return
        self.fixed_s = fixed_s = loads[len(loads) // 2][0]
        self.token_s = token_s = sum(load[1] for load in loads) / sum(load[2] for load in loads)
        if then is not None:
            fixed_s, token_s = fixed_s + then.fixed_s, token_s + then.token_s
        gain = seconds_per_token - token_s
        reached = fixed_s / gain if gain > 0 else NEVER_TOKENS
        self.tokens = min(math.ceil(reached), NEVER_TOKENS)

    def least(self, now: float) -> int:
        """Return the fewest tokens worth loading now; 0 if unknown.

        Measurements expire after a minute. Otherwise a minute of slow loads could stop all loads, and the length would
        never be measured again.
        """
        return self.tokens if now <= self._stale_at else 0


_STORING: Copies = (Direction.STORE,)
_LOADING: Copies = (Direction.LOAD,)


class NetBenefit:
    """Adds up the seconds saved and lost, on the engine's thread. Any thread may read the public numbers.

    Args:
        block_tokens: the length of the shortest possible hit, in tokens.
        copies: the table of open copies.
        bus: the bus to observe, on which `NetBenefitTurned` is published.
        waits: the histogram of each kind of wait. Without a lower tier, fetches have none.
        set_least: called about once a second for each tier, with the fewest tokens worth a load (HOST) or worth a
            fetch and the load after it; 0 without measurements. None if the operator has set the length.
    """

    def __init__(
        self,
        block_tokens: int,
        copies: OpenCopies,
        bus: Bus,
        waits: Mapping[LoadWait, Histogram],
        set_least: Callable[[Tier, int], object] | None = None,
    ) -> None:
        self._open = copies
        self._hook = bus.hook
        self._rate = PrefillRate(_LEAST_BLOCKS * block_tokens)
        self._times = StepTimes()
        self._break_even = {tier: BreakEven() for tier in (Tier.HOST, *LOWER_TIERS)}
        self._set_least = set_least
        self._least_due_s = math.inf if set_least is None else -math.inf
        # For each request that waits, why its first lookup answered "not yet".
        self._deferrals: dict[RequestId, LoadWait] = {}
        # When each request's load, and each fetch for a request, was planned, and how many tokens it copies.
        self._loads: dict[RequestId, tuple[float, int]] = {}
        self._fetches: dict[JobId, tuple[float, int]] = {}
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
        self._period_began = self._judge_s = -math.inf
        self._period_net_s = 0.0
        self.is_negative = False
        self._bus = bus
        bus.count(facts.StepScheduled, self._step)
        bus.count(events.RequestsEnded, self._idle)
        bus.count(events.LookupDeferred, self._deferred)
        bus.count(events.WaitEnded, self._waited)
        bus.count(events.LoadScheduled, self._load_scheduled)
        bus.count(events.LoadOrphaned, self._load_orphaned)
        bus.count(events.LoadEnded, self._load_ended)
        bus.count(events.TierCopyScheduled, self._fetch_scheduled)
        bus.count(events.TierCopyEnded, self._fetch_ended)

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
        self._weigh()
        return {tier: each.tokens for tier, each in self._break_even.items()}

    # -- steps ------------------------------------------------------------------------------------------------------

    def _idle(self, _: events.RequestsEnded) -> None:
        """End the measurement of the last step."""
        if self._ran:
            now = self._hook.now
            self._rate.idle(now)
            self._stepped(now)
            self._ran = self._is_calm = self._is_steady = False

    def _step(self, fact: facts.StepScheduled) -> None:
        now = self._hook.now
        prefill, decode = fact.prefill_tokens, fact.decode_tokens
        copies = self._copying() if self._open.oldest is not None else ()
        # Inlined, for speed: in a row of decode-only steps, each step makes only two Python calls.
        is_calm = decode > 0 and not prefill
        if self._is_steady or (self._ran and self._copies):
            self._stepped(now)
        if prefill or self._rate.is_timing:
            usual_s = self._times.usual_s(decode) if prefill or decode else 0.0
            self._rate.step(now, prefill, usual_s)
        self._is_steady = is_calm and self._is_calm and copies == self._copies
        self._is_calm = is_calm
        self._copies = copies
        self._decoded = decode
        self._ran = is_calm or prefill > 0
        self._last_s = now
        if now >= self._least_due_s:
            self._push_least(now)
        if now >= self._judge_s:
            self._judge(now)

    def _push_least(self, now: float) -> None:
        assert self._set_least is not None
        self._least_due_s = now + _LEAST_PERIOD_S
        self._weigh()
        for tier, each in self._break_even.items():
            self._set_least(tier, each.least(now))

    def _stepped(self, now: float) -> None:
        """Measure the last step, which ends at `now`, and add the time that copies added to it."""
        seconds, copies = now - self._last_s, self._copies
        if self._is_steady:
            self._times.observe(seconds, self._decoded, copies)
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
        self._loads[event.request] = self._hook.now, event.tokens

    def _load_orphaned(self, event: events.LoadOrphaned) -> None:
        """Add a request's wait for its load until now, and ignore the load's end."""
        if (load := self._loads.pop(event.request, None)) is not None:
            self._waits[LoadWait.OWN_LOAD].observe(self._hook.now - load[0])

    def _load_ended(self, event: events.LoadEnded) -> None:
        load = self._loads.pop(event.request, None)
        if load is None:
            return
        planned, tokens = load
        waited_s = self._hook.now - planned
        self._waits[LoadWait.OWN_LOAD].observe(waited_s)
        if event.outcome is LoadOutcome.LOADED:
            self._unpriced_tokens += tokens
            self._break_even[Tier.HOST].loaded(self._hook.now, tokens, waited_s, event.copy_s)
            self._price()

    def _fetch_scheduled(self, event: events.TierCopyScheduled) -> None:
        if event.tokens:
            self._fetches[event.job] = self._hook.now, event.tokens

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

    def _weigh(self) -> None:
        rate = self._rate.seconds_per_token
        load = self._break_even[Tier.HOST]
        load.weigh(rate)
        for tier in LOWER_TIERS:
            self._break_even[tier].weigh(rate, load)

    def _copying(self) -> Copies:
        stores = _STORING if self._open.count(Direction.STORE, is_overdue=False) else ()
        return stores + (_LOADING if self._open.count(Direction.LOAD, is_overdue=False) else ())

    # -- sign changes -----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """End a period. Publish the period's net benefit if it has turned from gain to loss or back."""
        self._price()
        net = self.net_s
        gained = net - self._period_net_s
        self._period_net_s = net
        began, self._period_began = self._period_began, now
        self._judge_s = now + _PERIOD_S
        turned = gained > 0 if self.is_negative else gained < -_MATTERS * _PERIOD_S
        if turned and began > -math.inf:
            self.is_negative = not self.is_negative
            self._bus.publish(events.NetBenefitTurned(self.is_negative, gained, now - began))
