"""Net benefit: prefill seconds saved, less the seconds that requests waited and that copies added to steps.

    saved           loaded tokens, at the engine's measured prefill time of a token (`PrefillRate`)
    waited          per request, for its own load, another request's load of the same prefix, or a fetch from a lower tier
    interference    the share by which steps with copies are longer than steps without (`StepTimes`)

All follow from facts and events; an adapter only reports how many tokens a step computes. They are estimates, and this
package's README names their limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from kvoffload.bus.bus import Bus
from kvoffload.model import events, facts
from kvoffload.model.causes import CopyOutcome, LoadOutcome, TierOutcome
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.message import Message
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.break_even import BreakEven
from kvoffload.telemetry.labels import LoadWait
from kvoffload.telemetry.prefill_rate import PrefillRate
from kvoffload.telemetry.snapshot import Labels
from kvoffload.telemetry.step_times import Copies, StepTimes

_LEAST_BLOCKS = 4  # of a run of steps that says what prefilling takes
_PERIOD_S = 60.0  # over which the sign is judged
_MATTERS = 0.01  # of a period: a smaller loss is not worth a warning


class OpenCopies(Protocol):
    """The open copies, which every step asks for."""

    @property
    def oldest(self) -> object | None:
        """When the oldest job began, None without one."""

    def count(self, direction: Direction, *, is_overdue: bool) -> int:
        """Return how many jobs of a direction are open, or overdue."""


class _Load(Message, frozen=True):
    request: RequestId
    tokens: int
    since: float


_BELOW = Tier.DISK, Tier.REMOTE


class NetBenefit:
    """Adds the seconds up, on one thread; any thread may read `series`.

    Args:
        block_tokens: of the shortest hit.
        ranks: that copy a part of each job.
        copies: the open ones.
        now: monotonic seconds.
        set_least: takes a tier and the fewest tokens worth a load (HOST), or worth a fetch from it and the load after that, whenever
            measurements change them; 0 without any. None where the operator chose.
    """

    def __init__(
        self,
        block_tokens: int,
        ranks: int,
        copies: OpenCopies,
        now: Callable[[], float],
        set_least: Callable[[Tier, int], object] | None = None,
    ) -> None:
        self._ranks = ranks
        self._open = copies
        self._now = now
        self._rate = PrefillRate(_LEAST_BLOCKS * block_tokens)
        self._times = StepTimes()
        self._break_even = BreakEven()
        self._fetch_break_even = {tier: BreakEven() for tier in _BELOW}
        self._set_least = set_least
        self._least_changes_at = math.inf
        self._is_weighed = True  # nothing was measured since the break-even lengths were computed
        self._loads: dict[JobId, _Load] = {}
        self._fetches: dict[JobId, _Load] = {}
        self._copy_s: dict[JobId, float] = {}
        self._await_fetch: set[RequestId] = set()
        self._unpriced_tokens = 0
        self._saved_s = 0.0
        self._waited_s = dict.fromkeys(LoadWait, 0.0)
        self._interference_s = dict.fromkeys(Direction, 0.0)
        # Of the last step: when it was scheduled, whether it computed anything, whether it only decoded, and so did the
        # one before it with the same copies under way, how many tokens it decoded, and which copies those were.
        self._last_s = 0.0
        self._ran = self._is_calm = self._is_steady = False
        self._decoded = self._copies = 0
        self._period_began = self._judge_s = -math.inf
        self._period_net_s = 0.0
        self._is_negative = False
        self._publish: Callable[[events.NetBenefitTurned], None] = lambda event: None

    def subscribe(self, bus: Bus) -> None:
        """Follow the engine from now on; publish when the sign changes."""
        self._publish = bus.publish
        bus.count(facts.StepScheduled, self._step)
        bus.count(facts.RequestEnded, self._ended)
        bus.count(events.LookupDeferred, self._deferred)
        bus.count(events.LoadScheduled, self._load_scheduled)
        bus.count(events.RankReported, self._copied)
        bus.count(events.LoadEnded, self._load_ended)
        bus.count(events.TierCopyScheduled, self._fetch_scheduled)
        bus.count(events.TierCopyEnded, self._fetch_ended)

    @property
    def net_s(self) -> float:
        """Seconds saved less seconds lost, since the start."""
        return self._saved_s - sum(self._waited_s.values()) - sum(self._interference_s.values())

    def series(self) -> dict[str, dict[Labels, float]]:
        """Return the series of this class's metrics, by name."""
        self._weigh()
        rate = self._rate.seconds_per_token
        return {
            "kvoffload_prefill_seconds_saved_total": {(): self._saved_s},
            "kvoffload_load_wait_seconds_total": {(one.value,): s for one, s in self._waited_s.items()},
            "kvoffload_interference_seconds_total": {
                (one.value,): s for one, s in self._interference_s.items()
            },
            "kvoffload_prefill_tokens_per_second": {(): 1 / rate if rate else 0.0},
            "kvoffload_break_even_tokens": {(): self._break_even.tokens},
            "kvoffload_fetch_break_even_tokens": {
                (tier.value,): each.tokens for tier, each in self._fetch_break_even.items()
            },
            "kvoffload_net_benefit_negative": {(): float(self._is_negative)},
        }

    # -- steps ------------------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """The last request has ended: the time until the next step does not count."""
        if self._ran:
            now = self._now()
            self._rate.idle(now)
            self._stepped(now)
            self._ran = self._is_calm = self._is_steady = False

    def _step(self, fact: facts.StepScheduled) -> None:
        now = self._now()
        prefill, decode = fact.prefill_tokens, fact.decode_tokens
        copies = self._copying() if self._open.oldest is not None else 0
        # Inline, because every step runs this: a step that only decodes, like the one before, costs two calls.
        is_calm = decode > 0 and not prefill
        if self._is_steady or (self._ran and self._copies):
            self._stepped(now)
        if prefill or self._rate.is_timing:
            usual_s = self._times.usual_s(decode) if prefill or decode else 0.0
            self._rate.step(now, prefill, usual_s)
        self._is_steady = is_calm and self._is_calm and copies == self._copies
        self._is_calm, self._copies, self._decoded = is_calm, copies, decode
        self._ran = is_calm or prefill > 0
        self._last_s = now
        if now > self._least_changes_at:
            self._push_least(now)
        if now >= self._judge_s:
            self._judge(now)

    def _push_least(self, now: float) -> None:
        """Say how long a hit must be to be worth its copies, and wait until that may change."""
        assert self._set_least is not None
        self._weigh()
        lengths = {Tier.HOST: self._break_even, **self._fetch_break_even}
        for tier, each in lengths.items():
            self._set_least(tier, each.least(now))
        self._least_changes_at = min(
            [each.stale_at for each in lengths.values() if each.stale_at >= now], default=math.inf
        )

    def _stepped(self, now: float) -> None:
        """Account for the last step, which has ended."""
        seconds, copies = now - self._last_s, self._copies
        if self._is_steady:
            self._times.observe(seconds, self._decoded, copies)
        if copies and (slower := self._times.slowdown(copies)):
            lost = seconds * slower / (1 + slower)
            ways = _WAYS[copies]
            for way in ways:
                self._interference_s[way] += lost / len(ways)

    def _ended(self, fact: facts.RequestEnded) -> None:
        if self._loads:
            for job in [job for job, load in self._loads.items() if load.request == fact.request]:
                self._waited_s[LoadWait.OWN_LOAD] += self._now() - self._loads.pop(job).since

    # -- loads ------------------------------------------------------------------------------------------------------

    def waited(self, request: RequestId, seconds: float) -> None:
        """Add the time that a request's lookup was answered "not yet"."""
        reason = LoadWait.FETCH if request in self._await_fetch else LoadWait.OTHERS_LOAD
        self._await_fetch.discard(request)
        self._waited_s[reason] += seconds

    def _deferred(self, event: events.LookupDeferred) -> None:
        if event.owner is None:
            self._await_fetch.add(event.request)

    def _load_scheduled(self, event: events.LoadScheduled) -> None:
        self._loads[event.job] = _Load(event.request, event.tokens, self._now())

    def _copied(self, event: events.RankReported) -> None:
        if event.outcome is CopyOutcome.DONE and event.job in self._loads:
            self._copy_s[event.job] = self._copy_s.get(event.job, 0.0) + event.copy_s

    def _load_ended(self, event: events.LoadEnded) -> None:
        copy_s = self._copy_s.pop(event.job, 0.0) / self._ranks
        load = self._loads.pop(event.job, None)
        if load is None:
            return
        waited_s = self._now() - load.since
        self._waited_s[LoadWait.OWN_LOAD] += waited_s
        if event.outcome is LoadOutcome.LOADED:
            self._unpriced_tokens += load.tokens
            self._break_even.loaded(self._now(), load.tokens, waited_s, copy_s)
            self._price()

    def _fetch_scheduled(self, event: events.TierCopyScheduled) -> None:
        if event.tokens and event.request is not None:
            self._fetches[event.job] = _Load(event.request, event.tokens, self._now())

    def _fetch_ended(self, event: events.TierCopyEnded) -> None:
        fetch = self._fetches.pop(event.job, None)
        if fetch is not None and event.outcome is TierOutcome.DONE:
            now = self._now()
            waited_s = now - fetch.since
            copy_s = min(event.copy_s, waited_s)  # threads that copy side by side may add up to more
            self._fetch_break_even[event.tier].loaded(now, fetch.tokens, waited_s, copy_s)
            self._price()

    def _price(self) -> None:
        """Price loaded tokens, also those from before the first measurement."""
        rate = self._rate.seconds_per_token
        self._saved_s += self._unpriced_tokens * rate
        if rate:
            self._unpriced_tokens = 0
        self._is_weighed = False
        if self._set_least is not None:
            self._least_changes_at = -math.inf

    def _weigh(self) -> None:
        """Compute the break-even lengths if they are out of date. Loads only mark them so: a step weighs all that have ended."""
        if self._is_weighed:
            return
        self._is_weighed = True
        rate = self._rate.seconds_per_token
        self._break_even.weigh(rate)
        for each in self._fetch_break_even.values():
            each.weigh(rate, self._break_even)

    def _copying(self) -> int:
        """Return the directions of the open copies, as one of `Copies`."""
        stores = Copies.STORES if self._open.count(Direction.STORE, is_overdue=False) else 0
        return stores | (Copies.LOADS if self._open.count(Direction.LOAD, is_overdue=False) else 0)

    # -- the sign ---------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """End a period, and publish if the sign has changed. A period without gain or loss changes nothing."""
        self._price()
        net = self.net_s
        gained, self._period_net_s = net - self._period_net_s, net
        began, self._period_began = self._period_began, now
        self._judge_s = now + _PERIOD_S
        turned = gained > 0 if self._is_negative else gained < -_MATTERS * _PERIOD_S
        if turned and began > -math.inf:
            self._is_negative = not self._is_negative
            self._publish(events.NetBenefitTurned(self._is_negative, gained, now - began))


_WAYS: dict[int, tuple[Direction, ...]] = {
    Copies.STORES: (Direction.STORE,),
    Copies.LOADS: (Direction.LOAD,),
    Copies.BOTH: (Direction.STORE, Direction.LOAD),
}
