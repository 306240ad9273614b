"""Why a key is not on the host: a bounded record of recent keys' fates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kvoffload.model.causes import MissCause
from kvoffload.model.ids import BlockKey

_PARTS = 64
_LEAST_PART = 64  # keys


class MissMemory:
    """Remembers about the last `bound` keys that left the host or never reached it, and all that the last reset dropped.

    A large one has parts by the first byte of a key, each of which remembers its share: an `OrderedDict` whose keys
    come and go copies itself now and then, which takes 10 ms for 65,536 keys.
    """

    def __init__(self, bound: int = 65_536) -> None:
        self._parts = _PARTS if bound >= _PARTS * _LEAST_PART else 1
        self._bound = bound // self._parts
        self._causes: dict[int, OrderedDict[BlockKey, MissCause]] = {}
        self._before_reset: Mapping[BlockKey, object] = {}

    def note(self, keys: Iterable[BlockKey], cause: MissCause) -> None:
        """These keys are not on the host, and this is why."""
        causes, parts, bound = self._causes, self._parts, self._bound
        for key in keys:
            part = causes.get(key[0] % parts)
            if part is None:
                part = causes[key[0] % parts] = OrderedDict()
            part[key] = cause
            part.move_to_end(key)
            if len(part) > bound:
                part.popitem(last=False)

    def arrived(self, keys: Iterable[BlockKey]) -> None:
        """These keys are on the host now."""
        causes, parts = self._causes, self._parts
        for key in keys if causes else ():
            if (part := causes.get(key[0] % parts)) is not None:
                part.pop(key, None)

    def reset(self, dropped: Mapping[BlockKey, object]) -> None:
        """All keys known until now are from before the reset."""
        self._causes.clear()
        self._before_reset = dropped

    def cause(self, key: BlockKey) -> MissCause:
        """Return why a key that is not on the host misses. Reads only."""
        part = self._causes.get(key[0] % self._parts)
        if part is not None and (known := part.get(key)) is not None:
            return known
        return MissCause.AFTER_RESET if key in self._before_reset else MissCause.NEVER_SEEN
