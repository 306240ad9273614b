from __future__ import annotations

import pytest

from tests.soak import __main__ as command
from tests.soak.growth import Reading, growth_of, read, table
from tests.soak.on_reference import soak
from tests.telemetry.fake_source import FakeSource


def names_that_grow(readings: list[Reading]) -> list[str]:
    return [one.name for one in growth_of(readings) if not one.passed]


def test_growth_is_named_and_fluctuation_is_not() -> None:
    readings: list[Reading] = [
        {"flat": 5, "grows": 1000 + number, "falls": 100 - number, "noisy": 100 + 30 * (number % 7 == 3)}
        for number in range(40)
    ]
    assert names_that_grow(readings) == ["grows"]
    assert "grows" in command.summary(growth_of(readings))


def test_a_number_that_was_0_and_is_not_has_grown() -> None:
    readings: list[Reading] = [{"pins": number // 30} for number in range(40)]
    assert names_that_grow(readings) == ["pins"]
    assert names_that_grow([{}, {}, {}, {"new": 1}]) == ["new"]


def test_the_table_marks_growth_and_lists_numbers_that_stayed_0() -> None:
    page = table(growth_of([{"a": 1, "b": 0}, {"a": 1, "b": 0}, {"a": 1.5, "b": 0}]))
    assert "50.00%  GROWS" in page
    assert page.endswith("0 throughout: b")


def test_a_reading_has_the_processs_resources_and_every_gauge() -> None:
    states = ["empty", "filling", "ready", "pinned", "draining", "quarantined"]
    source = FakeSource(
        {
            "kvoffload_slots": {("host", state): 1 for state in states},
            "kvoffload_oldest_job_timestamp_seconds": {(): 7.0},
        }
    )
    found = read(source.gauges())
    assert found["slots empty or ready"] == 2
    assert found["slots host quarantined"] == 1
    assert found["oldest_job_timestamp_seconds"] == 7
    assert min(found["resident MiB"], found["open descriptors"], found["Python objects"]) > 0
    assert not any("ready" in name and name != "slots empty or ready" for name in found)


@pytest.mark.full
@pytest.mark.slow
def test_no_resource_grows_in_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.on_reference._CHECKED", 10)
    readings, words = soak(40, 4, lambda _: None)
    assert len(readings) >= 8
    assert "resets" in words
    # Resident memory is not checked, because other tests in this process change it.
    assert [name for name in names_that_grow(readings[2:]) if name != "resident MiB"] == []
