from __future__ import annotations

import pytest

from kvoffload.runtime.benefit import NEVER_TOKENS, BreakEven


def loads(
    found: BreakEven, *, fixed_s: float, copy_s_per_token: float, count: int = 40, now: float = 0.0
) -> None:
    for number in range(count):
        tokens = 100 + 10 * number
        copy_s = tokens * copy_s_per_token
        found.loaded(now, tokens, fixed_s + copy_s, copy_s)


@pytest.mark.parametrize(
    ("fixed_s", "copy_s", "prefill_s", "tokens"),
    [(0.1, 0.001, 0.002, 100), (0.0, 0.001, 0.002, 0), (0.05, 0.0, 0.01, 5)],
)
def test_the_break_even_is_where_loading_and_computing_take_equally_long(
    fixed_s: float, copy_s: float, prefill_s: float, tokens: int
) -> None:
    found = BreakEven()
    loads(found, fixed_s=fixed_s, copy_s_per_token=copy_s)
    found.weigh(prefill_s)
    assert found.tokens == pytest.approx(tokens, abs=1)


def test_the_load_after_a_fetch_counts_towards_the_break_even() -> None:
    load, fetch = BreakEven(), BreakEven()
    loads(load, fixed_s=0.1, copy_s_per_token=0.001)
    loads(fetch, fixed_s=0.2, copy_s_per_token=0.002)
    load.weigh(0.006)
    fetch.weigh(0.006, load)
    assert fetch.tokens == pytest.approx(100, abs=1)
    fetch.weigh(0.004)
    assert fetch.tokens == pytest.approx(100, abs=1)


def test_the_break_even_is_unknown_until_both_rates_are_measured() -> None:
    found = BreakEven()
    found.weigh(0.001)
    assert (found.tokens, found.least(0.0)) == (0, 0)
    loads(found, fixed_s=0.1, copy_s_per_token=0.001)
    found.weigh(0.0)
    assert (found.tokens, found.least(0.0)) == (0, 0)


@pytest.mark.parametrize("prefill_s", [0.0005, 0.001, 0.001000001])
def test_copies_slower_than_computing_have_no_break_even(prefill_s: float) -> None:
    found = BreakEven()
    loads(found, fixed_s=10.0, copy_s_per_token=0.001)
    found.weigh(prefill_s)
    assert found.tokens == found.least(0.0) == NEVER_TOKENS


def test_a_burst_of_loads_that_waited_for_each_other_changes_little() -> None:
    found = BreakEven()
    loads(found, fixed_s=0.1, copy_s_per_token=0.001)
    loads(found, fixed_s=9.0, copy_s_per_token=0.001, count=10)
    found.weigh(0.002)
    assert found.tokens == pytest.approx(100, abs=1)


def test_loads_are_tried_again_after_a_minute_without_loads() -> None:
    found = BreakEven()
    loads(found, fixed_s=9.0, copy_s_per_token=0.001)
    found.weigh(0.002)
    assert found.least(60.0) == pytest.approx(9000, abs=1)
    assert found.least(60.1) == 0
    loads(found, fixed_s=0.1, copy_s_per_token=0.0, count=1, now=61.0)
    found.weigh(0.002)
    assert found.least(61.0) == 50
