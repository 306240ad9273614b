"""The KV cache events that vLLM publishes of the host: keys that came and went, with what was noted of their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.ids import BlockKey
from kvoffload_vllm.events import EventMaker, NoteTaker, Wire
from kvoffload_vllm.groups import VllmGroups
from kvoffload_vllm.pool_device import VllmDevice
from kvoffload_vllm.tracked import RequestLike

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


class HostEvents:
    """Which blocks came to the host and which left it, as vLLM's events.

    Args:
        groups: the groups that are offloaded.
        index: reports which keys arrive and leave.
        wire: how vLLM writes events.
        device: knows which blocks may still be stored.
    """

    def __init__(self, groups: VllmGroups, index: KeyIndex, wire: Wire, device: VllmDevice) -> None:
        def is_on_device(key: BlockKey) -> bool:
            return device.block_of(key) is not None

        self._notes = NoteTaker(groups, wire, is_on_device)
        self._maker = EventMaker(groups, self._notes, wire)
        self._changes = index.watch()

    def note(self, request: RequestLike, first: int, computed_tokens: int) -> int:
        """Note a request's computed blocks but for those of its first hashes; return how many hashes are noted now."""
        return self._notes.take(request, first, computed_tokens)

    def take(self) -> Iterable[KVCacheEvent]:
        """Return what happened since the last call."""
        if not self._changes:
            return ()
        events = list(self._maker.events(self._changes))
        self._changes.clear()
        return events
