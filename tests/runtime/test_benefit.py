from __future__ import annotations

import pytest

from kvoffload.model.causes import CopyOutcome, Deferral
from kvoffload.model.config import AUTO
from kvoffload.model.events import LookupDeferred, NetBenefitTurned, WaitEnded
from kvoffload.model.ids import RequestId
from kvoffload.runtime.break_even import NEVER_TOKENS, BreakEven, BusyShare
from tests.runtime.parts import PER_TOKEN_S, RELOAD, Side, loading, measure_prefill, storing

COMPUTING_S = RELOAD * PER_TOKEN_S  # the duration of computing the tokens of one load


def saved(side: Side) -> float:
    return side.gauge("prefill_seconds_saved_total")


def waited(side: Side, reason: str = "own_load") -> float:
    return side.counts.distributions["kvoffload_load_wait_seconds"][reason,].total


def lost(side: Side, direction: str) -> float:
    side.side.bus.tick()  # measures the steps since the last tick
    return side.gauge("interference_seconds_total", direction)


def load(side: Side, name: str = "a", wait_s: float = 0.0) -> None:
    """Let a request load its prefix, which takes this long."""
    plan = loading(side, name)
    side.clock.jump(wait_s)
    side.done(plan)


# -- seconds saved and waited -----------------------------------------------------------------------------------


def test_saved_seconds_follow_the_measured_prefill_rate() -> None:
    side = Side()
    measure_prefill(side)
    load(side, wait_s=0.5)
    assert side.gauge("prefill_tokens_per_second") == pytest.approx(1 / PER_TOKEN_S)
    assert saved(side) == pytest.approx(COMPUTING_S)
    assert (waited(side), waited(side, "others_load")) == (0.5, 0)
    assert side.side.benefit.net_s == pytest.approx(COMPUTING_S - 0.5)


def test_loads_from_before_the_first_measurement_count_with_the_next_load() -> None:
    side = Side()
    for name in "ab":
        load(side, name)
        side.ended(name)
    assert saved(side) == 0
    measure_prefill(side)
    for number in (3, 4):
        load(side, f"c{number}")
        side.ended(f"c{number}")
        assert saved(side) == pytest.approx(number * COMPUTING_S)


@pytest.mark.parametrize("ends", ["the load fails", "the request ends"])
def test_a_load_without_use_counts_its_wait_and_saves_nothing(ends: str) -> None:
    side = Side()
    measure_prefill(side)
    plan = loading(side)
    side.clock.jump(0.25)
    if ends == "the load fails":
        side.done(plan, CopyOutcome.FAILED)
    else:
        side.ended("a")
        side.clock.jump(5.0)
        side.done(plan)
    assert (saved(side), waited(side)) == (0, 0.25)
    assert side.gauge("break_even_tokens") == 0


@pytest.mark.parametrize("end", ["found", "computes", "gone"])
def test_waiting_for_another_requests_load_counts_as_waiting(end: str) -> None:
    side = Side()
    plan = loading(side)
    other = side.seen("b")
    for _ in range(2):
        assert side.side.lookup(other, 0) is None
        side.clock.jump(0.5)
    side.done(plan)
    side.step(("a", RELOAD))
    if end == "found":
        assert side.side.lookup(other, 0) == RELOAD
    elif end == "computes":
        side.allocated("b")
    else:
        side.ended("b")
    side.clock.jump(5.0)
    side.allocated("b")
    assert (waited(side), waited(side, "others_load")) == (1.0, 1.0)


def test_a_wait_counts_under_the_first_reason_for_which_a_lookup_was_deferred() -> None:
    side, request = Side(), RequestId("a")
    for reason in (Deferral.ROOM, Deferral.OTHERS_LOAD):
        side.side.bus.publish(LookupDeferred(request, reason))
    side.side.bus.publish(WaitEnded(request, 2.0))
    side.side.bus.publish(LookupDeferred(request, Deferral.OTHERS_LOAD))
    side.side.bus.publish(WaitEnded(request, 3.0))
    assert (waited(side, "room"), waited(side, "others_load")) == (2.0, 3.0)


# -- interference -----------------------------------------------------------------------------------------------


def decode(side: Side, seconds: float, count: int = 400) -> None:
    for _ in range(count):
        side.step(decode=8)
        side.clock.jump(seconds)


@pytest.mark.parametrize(("direction", "other"), [("store", "load"), ("load", "store")])
def test_the_extra_time_of_steps_during_copies_counts_as_a_cost(direction: str, other: str) -> None:
    side = Side(transfer_timeout_s=1e6)
    side.seen("d")
    decode(side, 0.010)
    assert (lost(side, "store"), lost(side, "load")) == (0, 0)
    plan = storing(side, "a", decode=8) if direction == "store" else loading(side)
    decode(side, 0.012)
    before = lost(side, direction)
    decode(side, 0.012, 100)
    assert lost(side, direction) - before == pytest.approx(100 * 0.002, rel=0.05)
    assert lost(side, other) == 0
    side.done(plan)
    side.step(decode=8)
    side.step(decode=8)
    before = lost(side, direction)
    decode(side, 0.012)
    assert lost(side, direction) == before
    storing(side, "idle", "idle", decode=8)
    for name in ("d", "a", "idle"):
        side.ended(name)
    before = lost(side, "store")
    for _ in range(2):  # an idle engine counts no loss, although a copy is open
        side.clock.jump(1000.0)
        side.step()
        side.ended(side.seen("never runs"))
    assert lost(side, "store") == before


def test_an_idle_engine_has_counted_all_of_its_steps() -> None:
    side = Side(transfer_timeout_s=1e6)
    side.seen("d")
    decode(side, 0.010)
    storing(side, "a", decode=8)
    decode(side, 0.012)
    side.step()  # computes nothing, as the last step of an engine that schedules ahead
    for name in ("d", "a"):
        side.ended(name)
    found = side.gauge("interference_seconds_total", "store")
    assert found == lost(side, "store") > 0


# -- the sign ---------------------------------------------------------------------------------------------------


def test_a_loss_and_its_end_are_each_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    side = Side(portal=True)
    turns: list[bool] = []
    side.side.bus.count(NetBenefitTurned, lambda event: turns.append(event.is_negative))
    measure_prefill(side)
    for number, wait_s in enumerate((20.0, 20.0, 0.01, 0.0)):
        load(side, f"r{number}", wait_s)
        side.ended(f"r{number}")
        for _ in range(3):
            side.clock.jump(60.0)
            side.step()
        assert side.gauge("net_benefit_negative") == (number < 2)
    assert turns == [True, False]
    side.close()
    assert caplog.text.count("net_benefit_negative net_s=-19.88 period_s=") == 1
    assert caplog.text.count("net_benefit_positive") == 1


@pytest.mark.parametrize(("loss_s", "is_negative"), [(0.5, 0), (0.7, 1)])
def test_a_loss_below_1_percent_of_the_time_is_not_reported(loss_s: float, is_negative: int) -> None:
    side = Side()
    measure_prefill(side)
    load(side, wait_s=COMPUTING_S + loss_s)
    for _ in range(2):
        side.clock.jump(60.0)
        side.step()
    assert side.gauge("net_benefit_negative") == is_negative


# -- the break-even length --------------------------------------------------------------------------------------


def measured(
    fixed_s: float, copy_s_per_token: float = 0.001, before: BreakEven | None = None, count: int = 40
) -> BreakEven:
    """Return measurements of `count` loads, after those in `before`."""
    found = before or BreakEven()
    for number in range(count):
        tokens = 100 + 10 * number
        copy_s = tokens * copy_s_per_token
        found.loaded(0.0, tokens, fixed_s + copy_s, copy_s)
    found.weigh()
    return found


@pytest.mark.parametrize(
    ("fixed_s", "copy_s", "prefill_s", "tokens"),
    [
        (0.1, 0.001, 0.002, 100),
        (0.0, 0.001, 0.002, 0),
        (0.05, 0.0, 0.01, 5),
        *[(10.0, 0.001, prefill_s, NEVER_TOKENS) for prefill_s in (0.0005, 0.001, 0.001000001)],
    ],
)
def test_the_break_even_is_where_loading_and_computing_take_equally_long(
    fixed_s: float, copy_s: float, prefill_s: float, tokens: int
) -> None:
    found = measured(fixed_s, copy_s)
    assert found.tokens(0.0, prefill_s) == found.least(0.0, prefill_s) == pytest.approx(tokens, abs=1)


def test_the_load_after_a_fetch_counts_towards_the_break_even() -> None:
    after, fetch = measured(0.1), measured(0.2, 0.002)
    assert fetch.tokens(0.0, 0.006, after) == pytest.approx(100, abs=1)
    after.scheduled(0.0, 300)
    assert fetch.tokens(0.0, 0.006, after) == pytest.approx(200, abs=1)
    assert fetch.tokens(0.0, 0.004) == pytest.approx(100, abs=1)


def test_the_break_even_is_unknown_until_both_rates_are_measured() -> None:
    for found, prefill_s in ((BreakEven(), 0.001), (measured(0.1), 0.0)):
        assert found.tokens(0.0, prefill_s) == found.least(0.0, prefill_s) == 0


def test_a_burst_of_loads_whose_reports_waited_for_a_long_step_changes_little() -> None:
    found = measured(9.0, before=measured(0.1), count=22)
    assert found.tokens(0.0, 0.002) == pytest.approx(100, abs=1)


def test_loads_are_tried_again_after_a_minute_without_loads() -> None:
    found = measured(9.0)
    assert found.least(60.0, 0.002) == pytest.approx(9000, abs=1)
    assert found.least(60.1, 0.002) == 0
    found.scheduled(60.5, 0)
    assert found.least(60.5, 0.002) == pytest.approx(9000, abs=1)  # one load is enough to try
    found.loaded(61.0, 100, 0.1, 0.0)
    found.weigh()
    assert found.least(61.0, 0.002) == 50


def test_open_loads_make_only_longer_hits_worth_a_load() -> None:
    found = measured(0.1)
    assert found.scheduled(0.0, 200) == 0.0
    assert found.scheduled(0.05, 100) == pytest.approx(0.15)
    assert found.tokens(0.05, 0.002) == pytest.approx(350, abs=1)  # (0.1 + 0.25) / 0.001
    assert found.tokens(0.25, 0.002) == pytest.approx(150, abs=1)
    found.ended(0.25, 100)  # the first load took longer than expected
    assert found.tokens(0.25, 0.002) == pytest.approx(200, abs=1)
    found.ended(0.4, 0)
    assert found.tokens(0.4, 0.002) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("tokens_per_s", "delayed"), [(0, 1.0), (500, 2.0), (900, 10.0), (5000, 10.0)])
def test_computing_delays_more_requests_the_more_the_engine_prefills(
    tokens_per_s: int, delayed: float
) -> None:
    busy = BusyShare()
    for second in range(100):
        busy.update(float(second), 0.001)
        busy.tokens = tokens_per_s
    assert busy.delayed == pytest.approx(delayed, rel=0.01)


def test_the_time_of_a_copy_is_that_of_its_slowest_rank() -> None:
    side = Side(ranks=2)
    measure_prefill(side)
    plan = loading(side)
    side.clock.jump(1.0)
    side.done(plan, rank=0, copy_s=0.02)
    side.done(plan, rank=1, copy_s=0.06)
    side.clock.jump(1.0)
    side.step()
    expected = (1.0 - 0.06) / (PER_TOKEN_S - 0.06 / RELOAD)
    assert side.gauge("break_even_tokens") == pytest.approx(expected, abs=1)


# -- min_load_tokens = "auto" -----------------------------------------------------------------------------------


def measured_side(wait_s: float) -> Side:
    """Return a side that has measured a load of this duration, and a prefill of 10 ms per token."""
    side = Side(min_load_tokens=AUTO)
    measure_prefill(side)
    load(side, wait_s=wait_s)
    side.clock.jump(1.0)  # the side uses the measurements from now on
    side.step(("a", RELOAD))
    return side


@pytest.mark.parametrize(("wait_s", "answer"), [(COMPUTING_S, RELOAD), (COMPUTING_S + 0.01, 0)])
def test_auto_declines_hits_that_take_longer_to_load(wait_s: float, answer: int) -> None:
    side = measured_side(wait_s)
    assert side.side.lookup(side.seen("b"), 0) == answer
    side.allocated("b", answer)
    # The lookup found 12 of 13 tokens. If the hit is declined, that is the cause of the missing blocks;
    # otherwise only the last token is missing.
    assert side.counts.count("kvoffload_miss_blocks_total", "load_declined") == (answer == 0)


def test_auto_accepts_hits_of_one_block_until_it_has_measured() -> None:
    side = Side(min_load_tokens=AUTO)
    side.stored()
    assert side.side.lookup(side.seen("b"), RELOAD - 4) == 4


def test_auto_decides_once_per_request() -> None:
    side = measured_side(0.01)
    early = side.seen("b")
    assert side.side.lookup(early, 0) == RELOAD
    side.clock.jump(61.0)  # the next load replaces the measurements
    slow = side.seen("slow")
    assert side.side.lookup(slow, 0) == RELOAD
    side.allocated("slow", RELOAD)
    plan = side.step()
    side.clock.jump(20.0)
    side.done(plan)
    side.ended("slow")
    side.step()
    assert side.side.lookup(side.seen("c"), 0) == 0
    assert side.side.lookup(early, 0) == RELOAD


def test_auto_loads_the_first_hit_after_a_pause_in_which_its_measurements_expired() -> None:
    side = measured_side(25.0)
    side.ended("a")
    for pause_s, answer in ((50.0, 0), (61.0, RELOAD)):
        side.clock.jump(pause_s)
        assert side.side.lookup(side.seen("b"), 0) == answer
        side.ended("b")


def test_requests_that_wait_make_shorter_hits_worth_a_load() -> None:
    side = measured_side(2 * COMPUTING_S)
    alone = side.gauge("break_even_tokens")
    assert side.side.lookup(side.seen("alone"), 0) == 0
    others = [side.seen(f"o{number}") for number in range(2)]
    side.step(("a", RELOAD))
    assert side.side.lookup(side.seen("b"), 0) == RELOAD
    assert side.gauge("break_even_tokens") < RELOAD < alone
    for name in (*others, "a"):
        side.ended(name)
    side.step(decode=2)  # the requests that decode do not wait
    assert side.gauge("break_even_tokens") == alone
    side.ended("alone")
    side.ended("b")
    assert side.side.lookup(side.seen("c"), 0) == 0


def test_a_load_makes_the_hits_of_the_same_step_worth_less() -> None:
    side = Side(min_load_tokens=AUTO)
    measure_prefill(side)
    plan = loading(side)
    side.clock.jump(0.8 * COMPUTING_S)
    side.done(plan, copy_s=0.8 * COMPUTING_S)
    side.clock.jump(1.0)
    side.step(("a", RELOAD))
    side.ended("a")
    side.stored("q")
    assert side.side.lookup(side.seen("b"), 0) == RELOAD
    side.allocated("b", RELOAD)
    assert side.side.lookup(side.seen("c", "q"), 0) == 0
    side.ended("c")
    side.done(side.step())
    assert side.side.lookup(side.seen("d", "q"), 0) == RELOAD


def test_loads_that_are_copied_together_share_the_time_of_the_copy() -> None:
    side = Side(min_load_tokens=AUTO)
    measure_prefill(side)
    side.stored()
    for name in "ab":
        assert side.side.lookup(side.seen(name), 0) == RELOAD
    for name in "ab":
        side.allocated(name, RELOAD)
    plan = side.step()
    side.clock.jump(0.5)
    side.done(plan, copy_s=0.12)
    side.clock.jump(1.0)
    side.step(decode=2)
    expected = (0.5 - 0.12) / (PER_TOKEN_S - 0.12 / (2 * RELOAD))
    assert side.gauge("break_even_tokens") == pytest.approx(expected, abs=1)


def test_a_break_even_that_moves_by_far_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    side = Side(portal=True, min_load_tokens=AUTO)
    measure_prefill(side)
    for number, wait_s in enumerate((0.1, 0.11, 25.0)):
        load(side, f"r{number}", wait_s)
        side.ended(f"r{number}")
        for _ in range(2):
            side.clock.jump(61.0)
            side.step()
    side.close()
    assert caplog.text.count("break_even_moved") == 2
    reason = "a load takes 25000.0 ms and 0.0 us a token; computing takes 10000.0 us a token"
    assert f"break_even_moved tokens=2500 was=10 reason='{reason}" in caplog.text


def test_measurements_do_not_change_a_configured_minimum() -> None:
    side = Side(min_load_tokens=4)
    measure_prefill(side)
    load(side, wait_s=25.0)
    side.step(("a", RELOAD))
    assert side.gauge("break_even_tokens") == 2500
    assert side.side.lookup(side.seen("b"), 0) == RELOAD
