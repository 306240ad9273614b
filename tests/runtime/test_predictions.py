from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.cli.advise import reading_of
from kvoffload.cli.figures import add_up
from kvoffload.model import facts
from kvoffload.model.events import MetricsSampled, StorePolicyMoved
from kvoffload.model.ids import BlockKey, Rank, RequestId
from kvoffload.model.wire import TransferReport
from kvoffload.telemetry.capacity import CapacityCurve
from kvoffload.telemetry.catalogue import Series
from kvoffload.telemetry.records import read_journal
from tests.runtime.parts import Side

RATIO = "kvoffload_predicted_hit_tokens_ratio"


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    opened: list[Side] = []
    yield opened
    for side in opened:
        side.close()


def predicted(side: Side) -> Series:
    return side.side.gauges()[RATIO]


def test_predictions_appear_within_a_second_without_waking_the_loop(sides: list[Side]) -> None:
    side = Side(portal=True)
    sides.append(side)
    side.portal.advance()
    sleepers = side.clock.sleepers
    for _ in range(2):
        side.ended(side.seen("a"))
    side.portal.advance(0.9)
    assert side.clock.sleepers == sleepers  # the task still sleeps
    assert not any(predicted(side).values())
    side.portal.advance(0.2)
    assert predicted(side)["host", "1x"] > 0


def test_hooks_only_append_facts_to_the_queue(sides: list[Side]) -> None:
    plain, watched = Side(), Side(portal=True)
    sides += [plain, watched]
    for cls in (facts.RequestSeen, facts.StepScheduled, facts.RequestEnded, facts.CacheReset):
        without = {observer.__qualname__ for observer in plain.side.bus._routes[cls]}
        added = [one for one in watched.side.bus._routes[cls] if one.__qualname__ not in without]
        assert [one.__qualname__ for one in added if "Log" not in one.__qualname__] == ["deque.append"]


def test_others_can_read_how_many_blocks_and_bytes_fit_into_a_tier_and_are_free() -> None:
    side = Side(slots=50)
    side.stored()  # three blocks
    side.side.reported([TransferReport(Rank(0), (), 50, slot_bytes=1000)])
    page = side.side.gauges()
    assert page["kvoffload_capacity_blocks"] == {("host", "total"): 50, ("host", "free"): 47}
    assert page["kvoffload_capacity_bytes"] == {("host", "total"): 50_000, ("host", "free"): 47_000}


def test_without_a_portal_nothing_is_collected() -> None:
    side = Side()
    side.ended(side.seen("a"))
    assert side.side.observation.curve is None
    assert not any(predicted(side).values())


def test_the_journal_has_what_advice_needs_up_to_the_last_request(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    side = Side(portal=True, journal_path=path)
    side.ended(side.seen("a"))
    side.portal.advance(1.1)
    first = predicted(side)["host", "2x"]
    side.ended(side.seen("a"))
    side.close()
    last = predicted(side)["host", "2x"]
    samples = [one.message for one in read_journal(path) if isinstance(one.message, MetricsSampled)]
    assert [one.values[f"{RATIO} host,2x"] for one in samples] == [first, last]
    assert first < last
    reading = reading_of(add_up(read_journal(path)))
    assert reading.total(RATIO, tiers="host", capacity="2x") == last
    assert reading.total("kvoffload_capacity_slots", tier="host") == 50
    assert reading.values("kvoffload_info", "store_policy") == ["eager"]
    assert "kvoffload_host_bytes" in reading.samples, "from which one sees whether host memory grows"


def document(side: Side, name: str, prefix: str) -> None:
    """Serve a prompt of three blocks, and give the loop a second now and then."""
    side.side.seen(
        facts.RequestSeen(
            RequestId(name), 13, (tuple(BlockKey(f"{prefix}{each}".encode()) for each in range(3)),)
        )
    )
    side.ended(RequestId(name))
    side.portal.advance(0.1)
    side.step()


def policy_in_use(side: Side) -> list[str]:
    series = side.side.gauges()["kvoffload_store_policy"]
    return [policy for (policy,), flag in series.items() if flag]


def test_auto_moves_to_the_policy_that_finds_most_and_says_why(
    sides: list[Side], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    side = Side(portal=True, store_policy="auto", journal_path=tmp_path / "journal")
    sides.append(side)
    assert policy_in_use(side) == ["eager"]
    for number in range(600):
        document(side, f"{number}", f"{number % 140},")
    # 420 blocks return in turn. They fit only on the device and the host together, which have 400 and 50.
    assert policy_in_use(side) == ["lazy"]
    found = side.side.gauges()["kvoffload_predicted_policy_hit_ratio"]
    assert found["lazy",] > found["eager",]
    reason = 'reason="of the recent prompts\' blocks, lazy 52.3% and twice 10.6% would have been found"'
    assert f"store_policy_moved policy=lazy was=twice {reason}" in caplog.text
    side.close()
    read = [one.message for one in read_journal(tmp_path / "journal")]
    moves = [(one.was, one.policy) for one in read if isinstance(one, StorePolicyMoved)]
    assert moves == [("eager", "twice"), ("twice", "lazy")]


@pytest.mark.parametrize("policy", ["eager", "twice"])
def test_a_policy_that_the_operator_names_stays(sides: list[Side], policy: str) -> None:
    side = Side(portal=True, store_policy=policy)
    sides.append(side)
    curve = side.side.observation.curve
    assert curve is not None
    choice = curve.choice
    assert choice is not None
    choice.chosen = "lazy"
    for _ in range(128):
        side.step()
    assert side.side.core.store_policy == policy


def test_a_busy_engine_samples_once_a_minute(sides: list[Side], tmp_path: Path) -> None:
    side = Side(portal=True, journal_path=tmp_path / "journal")
    sides.append(side)
    found: list[MetricsSampled] = []
    side.side.bus.count(MetricsSampled, found.append)
    side.seen("a")  # it never ends
    for _ in range(64 * 3):
        side.portal.advance(0.5)
        side.step()
    assert len(found) == 2


def test_predictions_that_raise_are_removed_and_the_engine_goes_on(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: CapacityCurve) -> None:
        raise ValueError("no curve")

    side = Side(portal=True)
    sides.append(side)
    for _ in range(2):
        side.ended(side.seen("a"))
    side.portal.advance(1.1)
    assert any(predicted(side).values())
    monkeypatch.setattr(CapacityCurve, "measure", fail)
    side.portal.advance(3)
    assert not any(predicted(side).values())
    assert caplog.text.count("observer_removed name=Predictions error=\"ValueError('no curve')\"") == 1
    side.step()
    assert side.side.degraded is None
