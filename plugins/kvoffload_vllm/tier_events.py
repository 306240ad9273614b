"""The KV cache events that vLLM publishes of host, disk and store: keys that came and went, with what was noted of their blocks.

Of a store the events say what this engine knows: what it wrote there, and what the store said it has when it was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvoffload.core.key_index import KeyIndex
from kvoffload.model.ids import BlockKey
from kvoffload.model.transfer import Tier
from kvoffload_vllm.events import EventMaker, NoteTaker, Wire
from kvoffload_vllm.groups import VllmGroups
from kvoffload_vllm.pool_device import VllmDevice
from kvoffload_vllm.tracked import RequestLike

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


class TierEvents:
    """Which blocks came to a tier and which left it, as vLLM's events.

    Args:
        groups: the groups that are offloaded.
        indexes: of each tier, report which keys arrive and leave.
        wire: how vLLM writes events.
        device: knows which blocks may still be stored.
    """

    def __init__(
        self, groups: VllmGroups, indexes: Mapping[Tier, KeyIndex], wire: Wire, device: VllmDevice
    ) -> None:
        on_host = indexes[Tier.HOST] if len(indexes) > 1 else ()

        def is_held(key: BlockKey) -> bool:
            return device.block_of(key) is not None or key in on_host

        self._notes = NoteTaker(groups, wire, is_held)
        self._tiers = [
            (EventMaker(groups, self._notes, wire, tier), index.watch()) for tier, index in indexes.items()
        ]
        self._ledgers = [ledger for _, ledger in self._tiers]

    def note(self, request: RequestLike, first: int, computed_tokens: int) -> int:
        """Note a request's computed blocks but for those of its first hashes; return how many hashes are noted now."""
        return self._notes.take(request, first, computed_tokens)

    def take(self) -> Iterable[KVCacheEvent]:
        """Return what happened since the last call."""
        late = self._notes.late
        if not (late or any(self._ledgers)):
            return ()
        events: list[KVCacheEvent] = []
        for maker, ledger in self._tiers:
            arrived = [(key, True) for key in late if maker.has_left_out(key)]
            events += maker.events([*arrived, *ledger])
            ledger.clear()
        late.clear()
        return events
