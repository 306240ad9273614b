"""What vLLM publishes of the host: joins what the core tells of keys with what was noted of their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvoffload.core.key_index import KeyIndex
from kvoffload_vllm.events import BlockNotes, EventMaker, Wire
from kvoffload_vllm.groups import VllmGroups
from kvoffload_vllm.tracked import KeyMaker

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

_TURNS = 4  # device pools full of blocks that notes are kept of


class HostNews:
    """Which blocks came to the host and which left it, as vLLM's events.

    A block is noted when its request gets a place on the device for it, not when it is first heard of: a long queue
    would push out the notes of blocks that are about to be stored.

    Args:
        groups: the groups that are offloaded.
        keys: makes keys of block hashes.
        index: tells what comes and leaves.
        wire: how vLLM writes events.
    """

    def __init__(self, groups: VllmGroups, keys: KeyMaker, index: KeyIndex, wire: Wire) -> None:
        self._ratios = groups.hash_ratios
        self._keys = keys
        self._notes = BlockNotes(groups, _TURNS * len(groups.ids) * groups.shape.device_blocks)
        self._maker = EventMaker(groups, self._notes, wire)
        self._news = index.watch()

    def note(self, request: Request, first: int = 0) -> None:
        """Note a request's blocks that its hashes from number `first` on complete."""
        keys = self._keys.keys(request.block_hashes, first)
        self._notes.take(request, keys, [first // ratio for ratio in self._ratios])

    def take(self) -> Iterable[KVCacheEvent]:
        """Return what happened since the last call."""
        if not self._news:
            return ()
        events = list(self._maker.events(self._news))
        self._news.clear()
        return events
