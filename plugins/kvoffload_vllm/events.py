"""KV cache events for routers: which blocks arrived on the host or a tier below it, and which left.

An event contains a block's tokens. The tokens are known only while the block's request is alive, but the block may be
stored much later. So `BlockNotes` takes a note when a block is computed or loaded, and keeps it while the block may
still arrive on a tier. Notes contain token ids, so they are kept here instead of in the core, and only if vLLM
publishes events. A block that another process left on the disk or in the remote tier is published when its note is
taken. Events about the remote tier cover only the blocks that this engine wrote there or asked it for.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.model.ids import BlockKey
from kvoffload.model.wire import Tier
from kvoffload_vllm.groups import VllmGroups
from kvoffload_vllm.pool_device import GROUP_BYTES, group_suffix, split_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvoffload.core.key_index import KeyIndex
    from kvoffload_vllm.pool_device import VllmDevice

_PLACES = {  # vLLM's names of places; LOCAL is the machine that publishes the event
    Tier.HOST: {"medium": "CPU", "locality": "LOCAL"},
    Tier.DISK: {"medium": "STORAGE", "locality": "LOCAL"},
    Tier.REMOTE: {"medium": "STORAGE", "locality": "REMOTE"},
}
_TOKEN = "i"  # four bytes per token


@dataclass(frozen=True, slots=True)
class BlockNote:
    """The data about one block that its events contain.

    Args:
        parent: hash of the previous block, None for a prompt's first block.
        tokens: the block's token ids, packed: a tuple would take eight times the memory.
        adapter: id and name of the LoRA adapter that computed the block, None without one.
        extra_keys: vLLM's extra keys, which the block's hash covers in addition to the tokens; None if there are none.
    """

    parent: bytes | None
    tokens: bytes
    adapter: tuple[int, str] | None = None
    extra_keys: tuple[Any, ...] | None = None

    @property
    def token_ids(self) -> list[int]:
        return array(_TOKEN, self.tokens).tolist()


class BlockNotes:
    """Notes of the blocks that requests compute, by block size and hash; the least recently checked note comes first.

    A note is kept after its block has arrived on a tier, because the block may leave and arrive again. Groups with the
    same block size share notes: their blocks that end with the same token have the same hash.

    Args:
        groups: the groups that are offloaded.
        wire: the event classes and conversions of the installed vLLM.
        is_held: whether the device or the host has a key's block, so that the block can still be copied to a tier. A
            block stays on the device while it is being copied.

    Attributes:
        awaited: for each block that arrived on a tier before its note: the block's key and the tiers on which it
            arrived.
        late: awaited keys whose note has been taken since the last `TierEvents.take`.
        by_ratio: the notes by block hash, for each block size (measured in hashes).
    """

    def __init__(self, groups: VllmGroups, wire: Wire, is_held: Callable[[BlockKey], bool]) -> None:
        self.awaited: dict[BlockKey, set[Tier]] = {}
        self.late: list[BlockKey] = []
        self._wire = wire
        self._is_held = is_held
        self._hash_tokens = groups.hash_tokens
        self._limit = groups.shape.device_blocks
        self._ratios = dict(zip(groups.ids, groups.hash_ratios, strict=True))
        self.by_ratio: dict[int, OrderedDict[bytes, BlockNote]] = {
            ratio: OrderedDict() for ratio in groups.hash_ratios
        }

    def get(self, key: BlockKey) -> BlockNote | None:
        """Return a block's note, None if it has none."""
        block_hash, number = split_key(key)
        return self.by_ratio[self._ratios[number]].get(block_hash)

    def take(self, request: Request, first: int, computed_tokens: int) -> int:
        """Note the blocks that hold a request's computed tokens.

        Args:
            request: vLLM's request.
            first: how many of the request's hashes are already noted.
            computed_tokens: how many tokens of the request are computed. A partly computed block is not noted.

        Returns:
            How many of the request's hashes are noted now.
        """
        last = min(computed_tokens // self._hash_tokens, len(request.block_hashes))
        if last <= first:
            return first
        for ratio in self.by_ratio:
            self._take(request, range(first // ratio, last // ratio), ratio)
        return last

    def _take(self, request: Request, positions: range, ratio: int) -> None:
        lora, hashes, notes = request.lora_request, request.block_hashes, self.by_ratio[ratio]
        adapter = (lora.adapter_id, lora.name) if lora else None
        tokens, media = ratio * self._hash_tokens, 0
        for position in positions:
            block_hash = hashes[(position + 1) * ratio - 1]
            if block_hash in notes:
                continue
            start, end = position * tokens, (position + 1) * tokens
            extra_keys, media = self._wire.extra_keys(request, start, end, media)
            parent = hashes[position * ratio - 1] if position else None
            packed = array(_TOKEN, request.all_token_ids[start:end]).tobytes()
            notes[block_hash] = BlockNote(parent, packed, adapter, extra_keys)
            self._drop_oldest(ratio)
            if self.awaited:
                self.late += [key for key in self._keys(block_hash, ratio) if key in self.awaited]

    def _drop_oldest(self, ratio: int) -> None:
        """Above the limit, check the two oldest notes, and drop each note that is no longer needed.

        Two checks for each added note keep the total below twice the number of needed notes.
        """
        notes = self.by_ratio[ratio]
        for _ in range(2):
            if len(notes) > self._limit:
                block_hash, note = notes.popitem(last=False)
                if any(map(self._is_held, self._keys(block_hash, ratio))):
                    notes[block_hash] = note

    def _keys(self, block_hash: bytes, ratio: int) -> Iterator[BlockKey]:
        return (BlockKey(block_hash + group_suffix(n)) for n, own in self._ratios.items() if own == ratio)


class TierEvents:
    """Turns the arrivals and removals of blocks on each tier into vLLM's events.

    Args:
        groups: the groups that are offloaded.
        indexes: the index of each tier, which logs the keys that arrive and leave.
        wire: the event classes and conversions of the installed vLLM.
        device: vLLM's block pool, which tells whether a block may still be stored.
    """

    def __init__(
        self, groups: VllmGroups, indexes: Mapping[Tier, KeyIndex], wire: Wire, device: VllmDevice
    ) -> None:
        on_host = indexes[Tier.HOST] if len(indexes) > 1 else ()

        def is_held(key: BlockKey) -> bool:
            return device.block_of(key) is not None or key in on_host

        self.notes = BlockNotes(groups, wire, is_held)
        self._wire = wire
        specs = zip(groups.ids, groups.shape.groups, strict=True)
        self._tokens = {number: spec.block_tokens for number, spec in specs}
        self._ledgers = {tier: index.watch() for tier, index in indexes.items()}

    def take(self) -> Iterable[KVCacheEvent]:
        """Return the events since the last call."""
        late, awaited = self.notes.late, self.notes.awaited
        if not (late or any(self._ledgers.values())):
            return ()
        events: list[KVCacheEvent] = []
        for tier, ledger in self._ledgers.items():
            arrived = [(key, True) for key in late if tier in awaited.get(key, ())]
            events += self.events(tier, [*arrived, *ledger])
            ledger.clear()
        late.clear()
        return events

    def events(self, tier: Tier, ledger: Iterable[tuple[BlockKey, bool]]) -> Iterator[KVCacheEvent]:
        """Yield one removal event per group, then one event for each block that arrived, parents first.

        A block without a note is skipped when it arrives and when it leaves: without its parent it would look like the
        first block of a prompt.

        Args:
            tier: the tier of these blocks.
            ledger: keys that arrived (True) or left (False), in order; only the last entry of each key counts.
        """
        came: dict[BlockKey, BlockNote] = {}
        gone: dict[int, list[bytes]] = {}
        for key, has_come in dict(ledger).items():
            note = self.notes.get(key)
            if has_come and note is None:
                self.notes.awaited.setdefault(key, set()).add(tier)
                continue
            was_left_out = self._awaits_no_more(key, tier)
            if has_come and note is not None:
                came[key] = note
            elif not was_left_out:
                block_hash, number = split_key(key)
                gone.setdefault(number, []).append(self._wire.hash(block_hash))
        for number, hashes in gone.items():
            yield self._wire.removed(block_hashes=hashes, group_idx=number, **_PLACES[tier])
        for key in _parents_first(came):
            yield self._stored(tier, key, came[key])

    def _awaits_no_more(self, key: BlockKey, tier: Tier) -> bool:
        """Stop waiting for the note of a key on a tier. Return whether a block waited for the note."""
        tiers = self.notes.awaited.get(key, set())
        was_left_out = tier in tiers
        tiers.discard(tier)
        if was_left_out and not tiers:
            del self.notes.awaited[key]
        return was_left_out

    def _stored(self, tier: Tier, key: BlockKey, note: BlockNote) -> KVCacheEvent:
        block_hash, number = split_key(key)
        kind, window = self._wire.kinds[number]
        lora_id, lora_name = note.adapter or (None, None)
        return self._wire.stored(
            block_hashes=[self._wire.hash(block_hash)],
            parent_block_hash=self._wire.hash(note.parent) if note.parent is not None else None,
            token_ids=note.token_ids,
            block_size=self._tokens[number],
            lora_id=lora_id,
            lora_name=lora_name,
            extra_keys=[note.extra_keys],
            group_idx=number,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **_PLACES[tier],
        )


@dataclass(frozen=True, slots=True)
class Wire:
    """The event classes and conversions of one vLLM version.

    Args:
        stored, removed: the classes of the two events, called with keywords.
        hash: converts a block hash to its form in events.
        extra_keys: takes a request, the start and end of a block in tokens, and the index of the request's next media
            item. Returns the extra keys that the block's hash covers, and the index of the media item after the block.
        kinds: by vLLM's group number, vLLM's name for the attention kind, and the window if there is one.
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    hash: Callable[[bytes], Any]
    extra_keys: Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
    kinds: Mapping[int, tuple[str, int | None]]


def find_wire(kv_cache_config: KVCacheConfig) -> Wire:
    """Return the event classes and conversions of the installed vLLM for these groups."""
    from vllm.distributed import kv_events
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    # Since 0.31, vLLM tags the extra keys that a hash covers; events contain them without tags.
    untag = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)

    def extra_keys(request: Request, start: int, end: int, media: int) -> tuple[tuple[Any, ...] | None, int]:
        keys, media = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, media)
        return untag([keys])[0] if keys else None, media

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return Wire(
        stored=kv_events.BlockStored,
        removed=kv_events.BlockRemoved,
        hash=kv_cache_utils.maybe_convert_block_hash,
        extra_keys=extra_keys,
        kinds={
            number: (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for number, spec in enumerate(specs)
        },
    )


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether this engine publishes KV cache events."""
    settings: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(settings is not None and settings.enable_kv_cache_events)


def _parents_first(came: Mapping[BlockKey, BlockNote]) -> Iterator[BlockKey]:
    """Yield each key after its parent's: a router drops a block with an unknown parent."""
    rest = dict(came)
    for key in came:
        line: list[BlockKey] = []
        while (note := rest.pop(key, None)) is not None:
            line.append(key)
            key = BlockKey((note.parent or b"") + key[-GROUP_BYTES:])
        yield from reversed(line)
