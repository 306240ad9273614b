from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.bus.bus import Batch, Bus
from kvoffload.core.tally import Tally


@dataclass(frozen=True, slots=True)
class Base:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Child(Base):
    pass


@dataclass(frozen=True, slots=True)
class Other:
    number: int = 0


def test_a_message_reaches_its_classs_state_handler_then_subscribers_in_order_then_batch_handlers() -> None:
    bus, calls = Bus(), list[str]()
    bus.keep(lambda batches: calls.append(f"{len(batches)} batches"), float)
    bus.count(Base, lambda _: calls.append("base, first"))
    bus.count(Child, lambda _: calls.append("child, second"))
    bus.count(Base, lambda _: calls.append("base, third"))
    bus.handle(Base, lambda _: calls.append("base's state"))
    bus.handle(Child, lambda _: calls.append("child's state"))
    with pytest.raises(ValueError, match="Base has a handler already"):
        bus.handle(Base, lambda _: calls.append("another"))
    for message in (Child(), Base(), Other()):
        bus.publish(message)
    assert calls == [
        *("child's state", "child, second", "1 batches"),
        *("base's state", "base, first", "base, third", "1 batches"),
        "1 batches",
    ]


def test_messages_that_a_handler_published_follow_its_fact_in_one_batch() -> None:
    tally = Tally(())
    bus, seen, batches = Bus(tally), list[object](), list[list[object]]()
    bus.handle(Base, lambda _: tally.events.extend([Other(1), Other(2)]))  # type: ignore[list-item]
    bus.count(Base, seen.append)
    bus.count(Other, seen.append)
    keep(bus, batches)
    bus.publish(Base())
    bus.dispatch([Other(3), Base(1)])
    assert seen == [Base(), Other(1), Other(2), Other(3), Base(1), Other(1), Other(2)]
    assert batches == [seen[:3], seen[3:]]
    assert bus.published == 7


def test_batch_handlers_get_many_messages_with_their_numbers_and_times() -> None:
    bus, recorded, clock = Bus(), list[list[Batch]](), iter([0.5, 1.5, 2.5])
    bus.publish(Base(0))
    kept = bus.keep(lambda batches: recorded.append(list(batches)), lambda: next(clock), at_a_time=3)
    bus.dispatch([Base(1), Base(2)])
    assert kept == [(1, 0.5, [Base(1), Base(2)])]
    assert not recorded
    bus.dispatch([Base(3), Base(4)])
    assert recorded == [[(1, 0.5, [Base(1), Base(2)]), (3, 1.5, [Base(3), Base(4)])]]
    assert not kept
    bus.dispatch([Base(5), Base(6)])
    assert kept == [(5, 2.5, [Base(5), Base(6)])]


def test_a_subscription_also_covers_classes_published_before_it() -> None:
    bus, received = Bus(), list[object]()
    bus.publish(Base(1))
    bus.handle(Base, received.append)
    bus.publish(Base(2))
    bus.count(Base, received.append)
    bus.publish(Base(3))
    assert received == [Base(2), Base(3), Base(3)]


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=8))
def test_all_subscribers_see_all_messages_in_the_same_order(children: list[list[int]]) -> None:
    """While message N is handled, the subscribers in `children[N]` publish message N + 1."""
    bus, seen = Bus(), [list[int](), list[int](), list[int]()]

    def listen(who: int) -> None:
        def handle(message: Base) -> None:
            seen[who].append(message.number)
            for speaker in children[message.number]:
                if speaker == who and len(seen[0]) < 50 and message.number + 1 < len(children):
                    bus.publish(Base(message.number + 1))

        bus.count(Base, handle)

    for who in range(3):
        listen(who)
    bus.publish(Base(0))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] == sorted(seen[0])  # messages with a lower number are delivered first
    assert bus.published == len(seen[0])


def test_a_raising_state_handler_is_reported_and_stays() -> None:
    bus, received, errors, batches = Bus(), list[object](), list[str](), list[list[object]]()

    def report(error: Exception, message: object) -> None:
        errors.append(f"{error}: {message}")
        bus.publish(Other(7))

    bus.on_state_error = report
    bus.handle(Base, _raise)
    bus.count(Base, received.append)
    keep(bus, batches)
    bus.publish(Base(1))
    bus.publish(Base(2))
    assert received == [Base(1), Base(2)]
    assert errors == ["handler of 1: Base(number=1)", "handler of 2: Base(number=2)"]
    assert batches == [[Base(1), Other(7)], [Base(2), Other(7)]]


def test_without_a_callback_a_state_error_reaches_the_publisher() -> None:
    bus, received = Bus(), list[object]()
    bus.handle(Base, _raise)
    bus.count(Other, received.append)
    with pytest.raises(RuntimeError, match="handler of 1"):
        bus.publish(Base(1))
    bus.publish(Other(2))
    assert received == [Other(2)]


def test_a_callback_that_raises_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    bus, received = Bus(), list[object]()
    bus.on_state_error = lambda _error, _message: _raise(Base())
    bus.handle(Base, _raise)
    bus.count(Base, received.append)
    with caplog.at_level(logging.ERROR):
        bus.publish(Base(1))
    assert received == [Base(1)]
    assert [record.getMessage() for record in caplog.records] == ["callback_failed"]


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_raising_subscriber_is_removed_and_the_others_still_run(is_reported: bool) -> None:
    bus, received, removed = Bus(), list[object](), list[tuple[str, str]]()
    if is_reported:
        bus.on_removed = lambda name, error: removed.append((name, str(error)))
    bus.count(Base, _raise)
    bus.keep(_raise_of_batches, float)
    bus.count(Base, received.append)
    bus.dispatch([Base(1), Base(2)])
    bus.publish(Base(3))
    names = ("_raise", "_raise_of_batches")
    assert received == [Base(1), Base(2), Base(3)]
    assert removed == ([(name, "handler of 1") for name in names] if is_reported else [])


def test_callbacks_run_after_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    bus, calls = Bus(), list[str]()

    def ask(_: Base) -> None:
        bus.afterwards(lambda: calls.append("afterwards"))
        bus.afterwards(lambda: _raise(Base()))
        calls.append("counter")

    bus.count(Base, ask)
    bus.keep(lambda _: calls.append("kept"), float)
    with caplog.at_level(logging.ERROR):
        bus.publish(Base())
    bus.publish(Other())
    assert calls == ["counter", "kept", "afterwards", "kept"]


def keep(bus: Bus, batches: list[list[object]]) -> None:
    """From now on, append each batch's messages to `batches`."""
    bus.keep(lambda kept: batches.extend([messages for _, _, messages in kept]), float)


def _raise(message: Base) -> None:
    raise RuntimeError(f"handler of {message.number}")


def _raise_of_batches(batches: list[Batch]) -> None:
    message = batches[0][2][0]
    assert isinstance(message, Base)
    _raise(message)
