"""The keys that can hit, and the news of them for those who ask."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.model.ids import BlockKey, SlotId


class KeyIndex(dict[BlockKey, SlotId]):
    """The slot of each key that can hit. Only the pool writes; reading costs what a dict's does."""

    _news: list[tuple[BlockKey, bool]] | None = None  # of the class: unpickling sets items before attributes

    def watch(self) -> list[tuple[BlockKey, bool]]:
        """Return a list that takes, in order, each key that comes from now on (True) and each that leaves (False)."""
        self._news = []
        return self._news

    def came(self, pairs: Iterable[tuple[BlockKey, SlotId]]) -> None:
        """Take several keys in, in this order."""
        pairs = tuple(pairs)
        self.update(pairs)
        if self._news is not None:
            self._news += [(key, True) for key, _ in pairs]

    def __delitem__(self, key: BlockKey) -> None:
        super().__delitem__(key)
        if self._news is not None:
            self._news.append((key, False))

    def take_all(self) -> dict[BlockKey, SlotId]:
        """Empty the index and return what it held."""
        held = dict(self)
        self.clear()
        if self._news is not None:
            self._news += [(key, False) for key in held]
        return held
