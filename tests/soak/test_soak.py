from __future__ import annotations

import pytest

from tests.soak import __main__ as command
from tests.soak.growth import Reading, growth_of
from tests.soak.on_reference import soak


def names_that_grow(readings: list[Reading]) -> list[str]:
    return [one.name for one in growth_of(readings) if not one.passed]


def test_growth_is_named_and_fluctuation_is_not() -> None:
    readings: list[Reading] = [
        {"flat": 5, "grows": 1000 + number, "falls": 100 - number, "noisy": 100 + 30 * (number % 7 == 3)}
        for number in range(40)
    ]
    assert names_that_grow(readings) == ["grows"]
    assert "grows" in command.summary(growth_of(readings))


@pytest.mark.full
@pytest.mark.slow
def test_no_resource_grows_in_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.on_reference._CHECKED", 10)
    readings, words = soak(40, 4, lambda _: None)
    assert len(readings) >= 8
    assert "resets" in words
    # Resident memory is not checked, because other tests in this process change it.
    assert [name for name in names_that_grow(readings[2:]) if name != "resident MiB"] == []
