from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.bus.bus import Batch, Bus, Tick
from kvoffload.bus.current_hook import CurrentHook


@dataclass(frozen=True, slots=True)
class Base:
    number: int = 0


@dataclass(frozen=True, slots=True)
class Child(Base):
    pass


@dataclass(frozen=True, slots=True)
class Other:
    number: int = 0


def test_a_message_reaches_the_observers_of_its_class_in_order_and_then_with_its_batch_those_of_batches() -> (
    None
):
    bus, calls = Bus(CurrentHook(lambda: 7.5)), list[str]()
    bus.count(Batch, lambda batch: calls.append(f"{len(batch.messages)} after {batch.before} at {batch.at}"))
    bus.count(Base, lambda _: calls.append("base, first"))
    bus.count(Child, lambda _: calls.append("child"))
    bus.count(Base, lambda _: calls.append("base, second"))
    bus.publish(Child())
    bus.dispatch([Base(), Other()])
    assert calls == ["child", "1 after 0 at 7.5", "base, first", "base, second", "2 after 1 at 7.5"]


def test_an_observer_is_called_once_however_often_it_is_added_until_it_is_removed() -> None:
    bus, received = Bus(), list[object]()
    bus.publish(Base(1))
    bus.count(Base, received.append)
    bus.count(Base, received.append)
    bus.publish(Base(2))
    bus.uncount(Base, received.append)
    bus.uncount(Base, received.append)
    bus.publish(Base(3))
    assert received == [Base(2)]


def test_an_observer_that_removes_itself_does_not_keep_a_message_from_the_others() -> None:
    bus, received = Bus(), list[object]()

    def once(message: Base) -> None:
        received.append(message)
        bus.uncount(Base, once)

    bus.count(Base, once)
    bus.count(Base, received.append)
    bus.dispatch([Base(1), Base(2)])
    assert received == [Base(1), Base(1), Base(2)]


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=8))
def test_all_observers_see_all_messages_in_the_same_order(children: list[list[int]]) -> None:
    """While message N is handled, the observers in `children[N]` publish message N + 1."""
    bus, seen, batches = Bus(), [list[int](), list[int](), list[int]()], list[list[object]]()

    def listen(who: int) -> None:
        def handle(message: Base) -> None:
            seen[who].append(message.number)
            for speaker in children[message.number]:
                if speaker == who and len(seen[0]) < 50 and message.number + 1 < len(children):
                    bus.publish(Base(message.number + 1))

        bus.count(Base, handle)

    bus.count(Batch, lambda batch: batches.append(batch.messages))
    for who in range(3):
        listen(who)
    bus.publish(Base(0))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] == sorted(seen[0])  # messages with a lower number are delivered first
    assert batches == [[Base(number) for number in seen[0]]]


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_raising_observer_is_removed_and_the_others_still_run(is_reported: bool) -> None:
    bus, received, removed = Bus(), list[object](), list[tuple[str, str]]()
    if is_reported:
        bus.on_removed = lambda name, error: removed.append((name, str(error)))
    bus.count(Base, _raise)
    bus.count(Batch, _raise_of_batches)
    bus.count(Base, received.append)
    bus.dispatch([Base(1), Base(2)])
    bus.publish(Base(3))
    names = ("_raise", "_raise_of_batches")
    assert received == [Base(1), Base(2), Base(3)]
    assert removed == ([(name, "handler of 1") for name in names] if is_reported else [])


def test_a_tick_reaches_its_observers_and_is_no_message() -> None:
    bus, calls, removed = Bus(), list[str](), list[str]()
    bus.on_removed = lambda name, _: removed.append(name)
    bus.count(Tick, lambda _: calls.append("tick"))
    bus.count(Tick, lambda _: _raise(Base()))
    bus.count(Batch, lambda batch: calls.append(f"{len(batch.messages)} after {batch.before}"))
    bus.publish(Base(1))
    bus.tick()
    bus.tick()
    bus.publish(Base(2))
    assert calls == ["1 after 0", "tick", "tick", "1 after 1"]
    assert len(removed) == 1


def test_with_a_raising_method_its_objects_other_methods_are_removed() -> None:
    class Observer:
        def __init__(self) -> None:
            self.received: list[object] = []

        def raises(self, message: Base) -> None:
            _raise(message)

        def receives(self, message: Other) -> None:
            self.received.append(message)

    bus, first, second = Bus(), Observer(), Observer()
    for each in (first, second):
        bus.count(Other, each.receives)
    bus.count(Base, first.raises)
    bus.dispatch([Other(1), Base(1), Other(2)])
    assert (first.received, second.received) == ([Other(1)], [Other(1), Other(2)])


def test_a_callback_that_raises_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    bus, received = Bus(), list[object]()
    bus.on_removed = lambda _name, _error: _raise(Base())
    bus.count(Base, _raise)
    bus.count(Base, received.append)
    with caplog.at_level(logging.ERROR):
        bus.publish(Base(1))
    assert received == [Base(1)]
    assert [record.getMessage() for record in caplog.records] == ["callback_failed"]


def _raise(message: Base) -> None:
    raise RuntimeError(f"handler of {message.number}")


def _raise_of_batches(batch: Batch) -> None:
    _raise(batch.messages[0])
