from __future__ import annotations

from kvoffload.core.recent import RecentItems


def test_at_least_as_many_items_as_the_size_and_at_most_twice_as_many_are_remembered() -> None:
    recent = RecentItems[int]()
    for number in range(50):
        recent.add(number, 10)
        remembered = [item for item in range(50) if item in recent]
        assert remembered == list(range(number + 1 - len(remembered), number + 1))
        assert min(number + 1, 10) <= len(remembered) <= 20
