"""Who hears of what, in which order, and what an exception does."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.bus.bus import Bus
from kvoffload.bus.feed import Feed


@dataclass(frozen=True, slots=True)
class Base:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Child(Base):
    pass


@dataclass(frozen=True, slots=True)
class Other:
    number: int = 0


def test_every_handler_of_the_class_and_its_bases_is_called_in_order_of_registration() -> None:
    bus, calls = Bus(), list[str]()
    bus.on(Base, lambda _: calls.append("base, first"))
    bus.on(Child, lambda _: calls.append("child, second"))
    bus.on(Base, lambda _: calls.append("base, third"))
    bus.publish(Child())
    bus.publish(Base())
    bus.publish(Other())
    assert calls == ["base, first", "child, second", "base, third", "base, first", "base, third"]


def test_counters_come_after_state_handlers_and_feeds_after_counters() -> None:
    bus, calls = Bus(), list[str]()
    feed = bus.observe("watcher", [Base], 1)
    bus.count(Base, lambda _: calls.append(f"counter, {feed.statistics().waiting} waiting"))
    bus.on(Base, lambda _: calls.append("state"))
    bus.publish(Base())
    assert calls == ["state", "counter, 0 waiting"]
    assert feed.nowait() == Base()


def test_a_subscription_holds_for_classes_seen_before_it() -> None:
    bus, heard = Bus(), list[object]()
    bus.publish(Base(1))
    bus.on(Base, heard.append)
    bus.publish(Base(2))
    bus.count(Base, heard.append)
    bus.publish(Base(3))
    bus.observe("watcher", [Base], 1)
    bus.publish(Base(4))
    assert heard == [Base(2), Base(3), Base(3), Base(4), Base(4)]
    assert bus.statistics().feeds[0][1].waiting == 1


def test_a_nested_message_follows_when_everybody_has_heard_the_first() -> None:
    bus, calls = Bus(), list[tuple[str, int]]()

    def publish_more(message: Base) -> None:
        calls.append(("first", message.number))
        if message.number < 3:
            bus.publish(Base(message.number * 2 + 1))
            bus.publish(Base(message.number * 2 + 2))

    bus.on(Base, publish_more)
    bus.on(Base, lambda message: calls.append(("second", message.number)))
    bus.publish(Base(0))
    assert calls == [(who, number) for number in range(7) for who in ("first", "second")]


def test_a_nested_message_that_nobody_wants_is_not_queued() -> None:
    bus, waiting = Bus(), list[int]()
    bus.on(Base, lambda _: bus.publish(Other()))
    bus.on(Base, lambda _: waiting.append(bus.statistics().waiting))
    bus.publish(Base())
    assert waiting == [0]
    assert bus.statistics().published == 1


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=8))
def test_all_handlers_see_all_messages_in_the_same_order(children: list[list[int]]) -> None:
    """Property: message i publishes later ones from whichever of three handlers the draw names."""
    bus, seen = Bus(), [list[int](), list[int](), list[int]()]

    def listen(who: int) -> None:
        def handle(message: Base) -> None:
            seen[who].append(message.number)
            for speaker in children[message.number]:
                if speaker == who and len(seen[0]) < 50 and message.number + 1 < len(children):
                    bus.publish(Base(message.number + 1))

        bus.on(Base, handle)

    for who in range(3):
        listen(who)
    bus.publish(Base(0))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] == sorted(seen[0])  # breadth first: a generation ends before the next begins
    assert bus.statistics().waiting == 0


def test_a_raising_state_handler_is_told_of_and_the_others_still_run() -> None:
    bus, heard, errors = Bus(), list[object](), list[tuple[str, object]]()
    bus.on_state_error(lambda error, message: errors.append((str(error), message)))
    bus.on(Base, _raise)
    bus.on(Base, heard.append)
    bus.count(Base, heard.append)
    bus.publish(Base(1))
    bus.publish(Base(2))
    assert heard == [Base(1), Base(1), Base(2), Base(2)]
    assert errors == [("handler of 1", Base(1)), ("handler of 2", Base(2))]  # it is not removed
    assert bus.statistics().state_errors == 2


def test_without_a_callback_a_state_error_reaches_the_publisher_and_nothing_is_lost() -> None:
    bus, heard = Bus(), list[object]()

    def publish_then_raise(message: Base) -> None:
        bus.publish(Other(message.number))
        _raise(message)

    bus.on(Base, publish_then_raise)
    bus.on(Other, heard.append)
    with pytest.raises(RuntimeError, match="handler of 1"):
        bus.publish(Base(1))
    bus.publish(Other(2))
    assert heard == [Other(1), Other(2)]


def test_a_raising_callback_goes_no_further_than_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bus, heard = Bus(), list[object]()
    bus.on_state_error(lambda _error, _message: _raise(Base()))
    bus.on(Base, _raise)
    bus.on(Base, heard.append)
    with caplog.at_level(logging.ERROR):
        bus.publish(Base(1))
    assert heard == [Base(1)]
    assert [record.getMessage() for record in caplog.records] == ["callback_failed"]


@pytest.mark.parametrize("told", [True, False])
def test_a_raising_counter_is_removed_and_the_others_still_run(told: bool) -> None:
    bus, heard, removed = Bus(), list[object](), list[tuple[str, str]]()
    if told:
        bus.on_removed(lambda name, error: removed.append((name, str(error))))
    bus.count(Base, _raise)
    bus.count(Base, heard.append)
    bus.publish(Base(1))
    bus.publish(Base(2))
    assert heard == [Base(1), Base(2)]
    assert removed == ([("_raise", "handler of 1")] if told else [])
    assert bus.statistics().removed_counters == ("_raise",)


def test_a_counter_removed_in_a_burst_hears_none_of_its_rest() -> None:
    bus, calls = Bus(), list[int]()

    def count(message: Base) -> None:
        calls.append(message.number)
        _raise(message)

    def publish_more(message: Base) -> None:
        if not message.number:
            bus.publish(Base(1))

    bus.on(Base, publish_more)
    bus.count(Base, count)
    bus.publish(Base(0))
    assert calls == [0]


def test_a_feed_that_nobody_reads_any_more_is_forgotten_but_its_numbers_stay() -> None:
    bus = Bus()
    feed = bus.observe("watcher", [Base], 1)
    bus.publish(Base(1))
    bus.publish(Base(2))
    feed.abandon()
    for number in range(3):
        bus.publish(Base(number))
    assert bus.statistics().published == 3  # the third found the feed gone; the rest found nobody
    ((name, numbers),) = bus.statistics().feeds
    assert (name, numbers.published, numbers.dropped, numbers.waiting) == ("watcher", 2, 2, 0)


def test_a_feed_without_classes_is_its_owners() -> None:
    bus = Bus()
    feed: Feed[Base] = bus.observe("owner", [], 1)
    bus.publish(Base())
    assert feed.statistics().published == 0
    feed.offer(Base())
    assert bus.statistics().feeds[0][1].published == 1


def test_names_of_feeds_are_unique() -> None:
    bus = Bus()
    bus.observe("watcher", [Base], 1)
    with pytest.raises(ValueError, match="'watcher' exists"):
        bus.observe("watcher", [Base], 1)


def test_closing_the_bus_closes_the_feeds() -> None:
    bus = Bus()
    feed = bus.observe("watcher", [Base], 1)
    bus.close()
    assert not feed.offer(Base())


def _raise(message: Base) -> None:
    raise RuntimeError(f"handler of {message.number}")
