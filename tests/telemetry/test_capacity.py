from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvoffload.bus.bus import Bus
from kvoffload.model import facts
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, GroupId, RequestId
from kvoffload.telemetry.capacity import CapacityCurve, Sizes
from kvoffload.telemetry.catalogue import CAPACITIES
from kvoffload.testing import FakeClock
from tests.settings import make_config

BLOCK = 4
FULL = GroupSpec(GroupId(0), AttentionKind.FULL, BLOCK)
GIB = 2**30
RATIO = "kvoffload_predicted_hit_tokens_ratio"


class Engine:
    """Reports requests to a curve, as an engine's hooks do."""

    def __init__(
        self,
        host: int,
        disk: int = 0,
        *,
        device: int = 0,
        groups: Sequence[GroupSpec] = (FULL,),
        **settings: Any,  # noqa: ANN401  # those of `make_config`
    ) -> None:
        self.clock, self.bus = FakeClock(), Bus()
        self.groups = groups
        shape = EngineShape(tuple(groups), ranks=1, device_blocks=device, step_tokens=64)
        sizes = Sizes(host, disk, GIB // 2)
        self.curve = CapacityCurve(shape, make_config(**settings), lambda: sizes, self.clock.monotonic)
        self.curve.subscribe(self.bus)
        self.requests = 0

    def seen(self, blocks: Iterable[object], *, reads_cache: bool = True) -> RequestId:
        """Report a request whose prompt has these blocks and one more token."""
        self.requests += 1
        name, keys = RequestId(f"{self.requests}"), tuple(BlockKey(f"{one}".encode()) for one in blocks)
        prompt = len(keys) * BLOCK + 1
        self.bus.publish(facts.RequestSeen(name, prompt, tuple(keys for _ in self.groups), reads_cache))
        return name

    def found(self, tiers: str = "host") -> dict[str, float]:
        """Return the predicted shares of prompt tokens, as numbers of blocks of the whole prompts."""
        series = self.measured()[RATIO]
        return {name: series[tiers, name] for name in CAPACITIES}

    def measured(self) -> dict[str, Any]:
        while self.curve.take():
            pass
        self.curve.measure()
        return dict(self.curve.series)


def a_loop_of(blocks: int, rounds: int, engine: Engine) -> None:
    for _ in range(rounds):
        for block in range(blocks):
            engine.seen([block])
        engine.curve.take(blocks)


def test_a_host_finds_prompts_that_return_while_it_has_them() -> None:
    engine = Engine(host=8)
    a_loop_of(16, 100, engine)
    most = (
        BLOCK / (BLOCK + 1) * 0.99
    )  # one token of each prompt is computed, and the first round finds nothing
    assert engine.found() == pytest.approx(
        {**dict.fromkeys(("0.25x", "0.5x", "1x"), 0), **dict.fromkeys(("2x", "4x", "8x"), most)}
    )


@pytest.mark.parametrize(("device", "hits_at"), [(0, "4x"), (12, "4x"), (16, "0.25x")])
def test_what_a_small_host_lacks_is_found_on_the_device(device: int, hits_at: str) -> None:
    engine = Engine(host=4, device=device)
    a_loop_of(16, 50, engine)
    assert min(name for name, share in engine.found().items() if share > 0.5) == hits_at


def test_a_disk_finds_what_was_found_before_and_left_the_host() -> None:
    engine = Engine(host=4, disk=8)
    for _ in range(50):
        for block in range(8):
            engine.seen([block])
            engine.seen([block])  # found on the host, so it goes to the disk
    half = BLOCK / (BLOCK + 1) / 2
    assert engine.found("host_and_disk")["0.5x"] == pytest.approx(half)
    assert engine.found("host_and_disk")["1x"] == pytest.approx(2 * half, rel=0.02)
    eager = Engine(host=4, disk=8, disk_min_hits=0)
    a_loop_of(8, 50, eager)
    assert eager.found("host_and_disk")["0.5x"] == 0
    assert eager.found("host_and_disk")["1x"] == pytest.approx(2 * half, rel=0.03)


def test_the_blocks_of_answers_are_found_by_the_next_turn() -> None:
    engine, found = Engine(host=100), []
    for reports in (True, False):
        engine = Engine(host=100)
        for chat in range(20):
            name = engine.seen([f"{chat} prompt"])
            answer = ((BlockKey(f"{chat} answer".encode()),),)
            if reports and chat % 2:
                engine.bus.publish(facts.StepScheduled(1, (facts.Progress(name, 5, ((),), answer),)))
                engine.bus.publish(facts.RequestEnded(name, 9, ((),)))
            else:
                engine.bus.publish(facts.RequestEnded(name, 9, answer if reports else ((),)))
            engine.seen([f"{chat} prompt", f"{chat} answer"])
        found.append(engine.found()["1x"])
    assert found == pytest.approx([20 * 2 * BLOCK / (20 * (5 + 9)), 20 * BLOCK / (20 * (5 + 9))])


def test_requests_that_opt_out_look_nothing_up_and_leave_their_blocks() -> None:
    engine = Engine(host=8)
    engine.seen(["a"], reads_cache=False)
    engine.seen(["a"])
    engine.seen(["a"], reads_cache=False)
    assert engine.found()["1x"] == pytest.approx(BLOCK / (BLOCK + 1))


def test_nothing_computed_before_a_reset_counts_as_found_after_it() -> None:
    engine = Engine(host=8, disk=8, disk_min_hits=0)
    engine.seen(["a"])
    engine.bus.publish(facts.CacheReset())
    engine.seen(["a"])
    assert set(engine.found().values()) == set(engine.found("host_and_disk").values()) == {0.0}


def test_blocks_of_other_groups_take_slots_too() -> None:
    """Three groups store three blocks for the tokens of one, and one state now and then."""
    kinds = [AttentionKind.FULL, AttentionKind.FULL, AttentionKind.SLIDING_WINDOW, AttentionKind.RECURRENT]
    groups = [
        GroupSpec(GroupId(at), kind, BLOCK, 8 if kind is AttentionKind.SLIDING_WINDOW else None)
        for at, kind in enumerate(kinds)
    ]
    engine = Engine(host=3 * 8, groups=groups)
    a_loop_of(16, 50, engine)
    assert min(name for name, share in engine.found().items() if share) == "2x"


def test_the_next_gib_is_worth_what_two_more_slots_find() -> None:
    engine = Engine(host=15, disk=0)
    a_loop_of(16, 100, engine)
    for _ in range(100):
        engine.clock.jump(1)
        engine.measured()
    next_gib = engine.measured()["kvoffload_next_gib_tokens_per_second"]
    assert next_gib["host",] == pytest.approx(15 * 99 * BLOCK / 100, rel=0.1)
    assert next_gib["host_and_disk",] == 0  # no block is found on the host, so a disk gets none
    assert engine.measured()["kvoffload_predicted_prompt_tokens_per_second"][()] == 16 * 100 * 5 / 100


def test_a_restart_begins_anew_and_says_how_sure_it_is() -> None:
    engine = Engine(host=8)
    assert engine.measured()["kvoffload_predicted_margin_ratio"] == {(): 1.0}
    a_loop_of(4, 2, engine)
    early = engine.measured()["kvoffload_predicted_unknown_ratio"]["host", "1x"]
    a_loop_of(4, 100, engine)
    later = engine.measured()["kvoffload_predicted_unknown_ratio"]["host", "1x"]
    assert (early, later) == pytest.approx((0.5 * BLOCK / 5, 4 * BLOCK / (102 * 4 * 5)))
    engine.clock.jump(100)
    assert engine.measured()["kvoffload_predicted_seconds"] == {(): 100.0}


def test_no_more_can_be_unknown_than_was_not_found() -> None:
    engine = Engine(host=100)
    for name in [engine.seen(["a"]) for _ in range(10)]:
        new = tuple(BlockKey(f"{name} {number}".encode()) for number in range(5))
        engine.bus.publish(facts.RequestEnded(name, 0, (new,)))
    shares = engine.measured()
    assert shares["kvoffload_predicted_unknown_ratio"]["host", "1x"] == pytest.approx(BLOCK / 50)
    assert shares[RATIO]["host", "1x"] == pytest.approx(9 * BLOCK / 50)


def test_each_day_counts_twice_as_much_as_the_day_before() -> None:
    engine = Engine(host=8)
    a_loop_of(1, 11, engine)
    assert engine.found()["1x"] == pytest.approx(10 * BLOCK / (5 * 11))
    engine.clock.jump(90_000)
    assert engine.measured()["kvoffload_predicted_seconds"] == {(): 45_000.0}
    for number in range(10):
        engine.seen([f"new {number}"])
    assert engine.found()["1x"] == pytest.approx(10 / 2 * BLOCK / (5 * (11 / 2 + 10)))


def test_neither_the_queue_nor_the_table_of_requests_grows_without_bound() -> None:
    engine = Engine(host=10_000)
    for number in range(2000):
        engine.seen([number])
    engine.measured()
    assert engine.curve._curve.lookups == 1024
    for number in range(5000):  # the ends of these requests are never reported
        engine.seen([number])
        engine.curve.take()
    assert len(engine.curve._requests) == 4096
