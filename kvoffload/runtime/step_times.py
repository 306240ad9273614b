"""Measures how much copies slow steps, how much time prefilling adds, and when requests get their first token.

Engines report neither the end of a step nor a sampled token, so all measurements are derived from the times at which
steps are scheduled.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from msgspec.structs import replace

from kvoffload.bus.bus import Bus
from kvoffload.bus.current_hook import HasToken
from kvoffload.model.causes import LoadOutcome
from kvoffload.model.events import FirstTokenReached, LoadEnded, LookupAnswered
from kvoffload.model.facts import RequestEnded, RequestSeen, StepScheduled
from kvoffload.model.ids import RequestId
from kvoffload.model.wire import Direction, Tier

_DEVICE, _HOST = Tier.DEVICE, Tier.HOST
_QUIET_WEIGHT = 1 / 16
_SLOWDOWN_WEIGHT = 1 / 64
# A mean starts at the shortest of this many first steps, because the others may include a compilation.
_FIRST = 8
_OUTLIER = 4.0  # a longer step counts as this many times the usual duration

# How many recent runs to keep: enough that a stall, such as a compilation, hardly shifts the weighted median.
_RUNS = 33
_LONGEST_RUN = 32  # in steps that prefill; a longer run is split
# The smallest share of a run's time that counts as prefill, for noisy measurements of decode-only steps.
_LEAST_SHARE = 0.1

Copies = tuple[Direction, ...]
"""The directions of the copies that run during a step."""


class StepTimes:
    """Mean durations of decode-only steps with and without copies, to measure how much copies slow the engine.

    A step is compared with steps whose numbers of decoded tokens have the same bit length. The time from one step to
    the next counts only after two steps of the same kind, because an engine with two steps in flight schedules one
    while the other runs. Steps that prefill differ too much to be compared. They are assumed to slow down by the same
    share. One thread must report the steps in order.
    """

    def __init__(self) -> None:
        # The keys of `_quiet_s` and `_seen` are bit lengths of numbers of decoded tokens.
        self._quiet_s = defaultdict[int, float](float)
        self._seen = defaultdict[int, int](int)
        self._slowdown = defaultdict[Copies, float](float)

    def usual_s(self, tokens: int) -> float:
        """Return the usual seconds of a step that decodes this many tokens while no copy runs; 0 while unknown."""
        return self._quiet_s[max(tokens, 1).bit_length()]

    def slowdown(self, copies: Copies) -> float:
        """Return by which share of its duration such copies lengthen a step; 0 while unknown, never negative."""
        return max(self._slowdown[copies], 0.0)

    def observe(self, seconds: float, tokens: int, copies: Copies) -> None:
        """Add a step that decoded at least one token and prefilled none."""
        if seconds <= 0:
            return
        size = tokens.bit_length()
        usual = self._quiet_s[size]
        if copies:
            if usual:
                slower = min(seconds / usual, _OUTLIER) - 1
                self._slowdown[copies] += (slower - self._slowdown[copies]) * _SLOWDOWN_WEIGHT
        elif self._seen[size] < _FIRST:
            self._seen[size] += 1
            self._quiet_s[size] = min(seconds, usual or seconds)
        else:
            within = min(max(seconds, usual / _OUTLIER), usual * _OUTLIER)
            self._quiet_s[size] = usual + (within - usual) * _QUIET_WEIGHT


class PrefillRate:
    """Estimates the seconds that prefilling adds per token, from the times and contents of steps.

    An engine may schedule the next step before the current one ends, so a single step cannot be timed. Instead, the
    times of a run are added up: consecutive steps that prefill, and the step after them.

        steps       D   P   P   D   D          D decodes only, P prefills
        counted         |-----------|          from the run's first step to the second step after it
        subtracted      d   d   d              for each step, the usual time if it only decoded

    With one step in flight the three intervals are the durations of P, P and D; with two in flight, of D, P and P.
    Either way, the time left after the subtraction is what prefilling adds.

    Args:
        least_tokens: runs that prefill fewer tokens count only until there is a longer run, because they mostly measure
            a step's fixed cost.
    """

    def __init__(self, least_tokens: int) -> None:
        self._least_tokens = least_tokens
        self._runs: deque[tuple[float, int]] = deque(maxlen=_RUNS)
        self._is_provisional = True
        self._began = 0.0
        self._tokens = self._steps = 0
        self._usual_s = 0.0
        self._is_over = False
        self.is_timing = False
        """True while a run is open, in which steps without prefill must be reported too."""
        self._rate: float | None = 0.0  # None if runs were added since the rate was computed

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds that prefilling adds per token; 0 until measured. Any thread may read this property."""
        rate = self._rate
        if rate is None:
            rate = self._rate = _median(tuple(self._runs))
        return rate

    def step(self, now: float, tokens: int, usual_s: float) -> None:
        """Add a scheduled step.

        Args:
            now: the time, in monotonic seconds.
            tokens: how many tokens the step prefills.
            usual_s: the usual duration, in seconds, of a step that decodes the same number of tokens as this step and
                prefills none; 0 if the step computes nothing.
        """
        if self.is_timing and (self._is_over or self._steps == _LONGEST_RUN):
            self._end(now)
        if not tokens:
            self._is_over = True
            self._usual_s += usual_s
            return
        if not self.is_timing:
            self.is_timing = True
            self._began = now
            self._tokens = self._steps = 0
            self._usual_s = 0.0
            self._is_over = False
        self._tokens += tokens
        self._steps += 1
        self._usual_s += usual_s

    def idle(self, now: float) -> None:
        """End the run when the engine becomes idle."""
        if self.is_timing:
            self._end(now)

    def _end(self, now: float) -> None:
        took = now - self._began
        self.is_timing = False
        is_long = self._tokens >= self._least_tokens
        if took <= 0 or not (is_long or self._is_provisional):
            return
        if is_long and self._is_provisional:
            self._runs.clear()
            self._is_provisional = False
        seconds = max(took - self._usual_s, _LEAST_SHARE * took)
        self._runs.append((seconds / self._tokens, self._tokens))
        self._rate = None


def _median(runs: Sequence[tuple[float, int]]) -> float:
    """Return the median of the runs' seconds per token, weighted by their tokens; 0 without runs."""
    half = sum([tokens for _, tokens in runs]) / 2
    reached = 0
    for seconds, tokens in sorted(runs):
        reached += tokens
        if reached >= half:
            return seconds
    return 0.0


class FirstTokens:
    """Measures the time to first token of each request, and reports it with the tier in which the lookup found blocks.

    Each step checks the admitted requests that have no token yet. The measured time ends at the first step after the
    token, or at the request's end.

    Args:
        bus: the bus to observe, on which `FirstTokenReached` is published.
    """

    def __init__(self, bus: Bus) -> None:
        self._hook = bus.hook
        self._bus = bus
        self._waiting: dict[RequestId, tuple[float, HasToken]] = {}
        """For each request without a token, its arrival time and a check for its first token."""
        self._admitted: dict[RequestId, LookupAnswered] = {}
        """Admitted requests without a token, and the answer of each request's last lookup."""
        bus.count(RequestSeen, self._seen)
        bus.count(LookupAnswered, self._settled)
        bus.count(LoadEnded, self._load_ended)

    def _seen(self, fact: RequestSeen) -> None:
        has_token = self._hook.has_token
        if has_token is not None:
            if not self._waiting:
                self._bus.count(RequestEnded, self._ended)
            self._waiting[fact.request] = self._hook.now, has_token

    def _settled(self, event: LookupAnswered) -> None:
        if event.request in self._waiting:
            if not self._admitted:
                self._bus.count(StepScheduled, self._look)
            self._admitted[event.request] = event

    def _look(self, _: StepScheduled) -> None:
        """Report the requests that have got their first token since the last step."""
        for request in tuple(self._admitted):
            if self._waiting[request][1]():
                self._bus.publish(self._arrived(request))
        if not self._admitted:
            self._bus.uncount(StepScheduled, self._look)

    def _ended(self, fact: RequestEnded) -> None:
        """Remove a request that ends. Report it if it got its first token in its last step."""
        request = fact.request
        if request in self._admitted and self._waiting[request][1]():
            self._bus.publish(self._arrived(request))
        self._waiting.pop(request, None)
        self._admitted.pop(request, None)
        if not self._waiting:
            self._bus.uncount(RequestEnded, self._ended)

    def _load_ended(self, event: LoadEnded) -> None:
        """If a request's load failed, the request computes the tokens of its hit."""
        if event.outcome is not LoadOutcome.LOADED and event.request in self._admitted:
            found = self._admitted[event.request]
            computed = found.miss_tokens + found.hit_tokens
            self._admitted[event.request] = replace(found, hit_tokens=0, fetched=(), miss_tokens=computed)

    def _arrived(self, request: RequestId) -> FirstTokenReached:
        waited_s = self._hook.now - self._waiting.pop(request)[0]
        answer = self._admitted.pop(request)
        fetched, host = answer.fetched, answer.hit_tokens
        if fetched:
            host -= sum([count for _, count in fetched])
        found = _HOST if host else _DEVICE if answer.device_tokens else None
        for tier, count in fetched:
            found = tier if count else found
        return FirstTokenReached(
            request,
            found,
            waited_s,
            answer.device_tokens,
            host,
            fetched,
            answer.miss_tokens,
        )
