"""Why a key is not on the host: a bounded memory of what became of recent keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kvoffload.model.causes import MissCause
from kvoffload.model.ids import BlockKey


class MissMemory:
    """Remembers the last `bound` keys that left the host or never reached it, and all that the last reset dropped."""

    def __init__(self, bound: int = 65_536) -> None:
        self._bound = bound
        self._causes: OrderedDict[BlockKey, MissCause] = OrderedDict()
        self._before_reset: Mapping[BlockKey, object] = {}

    def note(self, keys: Iterable[BlockKey], cause: MissCause) -> None:
        """These keys are not on the host, and this is why."""
        causes = self._causes
        for key in keys:
            causes[key] = cause
            causes.move_to_end(key)
        while len(causes) > self._bound:
            causes.popitem(last=False)

    def arrived(self, keys: Iterable[BlockKey]) -> None:
        """These keys are on the host now."""
        for key in keys:
            self._causes.pop(key, None)

    def reset(self, dropped: Mapping[BlockKey, object]) -> None:
        """All keys known until now are of before the reset."""
        self._causes.clear()
        self._before_reset = dropped

    def cause(self, key: BlockKey) -> MissCause:
        """Return why a key that is not on the host misses. Reads only."""
        known = self._causes.get(key)
        if known is not None:
            return known
        return MissCause.AFTER_RESET if key in self._before_reset else MissCause.NEVER_SEEN
