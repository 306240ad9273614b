"""Makes vLLM's KV cache events, which report to routers which blocks arrive on a tier and which blocks leave the tier.

An event contains a block's tokens. vLLM knows the tokens only while the block's request is alive, but kvoffload may
store the block much later. So `BlockNotes` records the tokens in a note when a request computes or loads the block, and
keeps the note while the block may still arrive on a tier. Notes exist only if vLLM publishes events.

Blocks that an earlier engine left on the host or the disk are announced from `KeptNotes`: after the last one was
adopted, parents first, some in each step. For other blocks that another process stored, the event waits until a request
of this engine computes or loads the block. The remote tier's events cover only blocks that this engine stored or looked
up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import Tier
from kvoffload_vllm.groups import VllmGroups
from kvoffload_vllm.kept_notes import KeptNote, KeptNotes
from kvoffload_vllm.places import PLACES
from kvoffload_vllm.pool_device import GROUP_BYTES, group_suffix, split_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvoffload.core.key_index import KeyIndex
    from kvoffload_vllm.pool_device import VllmDevice

_ANNOUNCED = 1024  # how many adopted blocks are announced in one step, which takes a few milliseconds
# One set for all blocks: of a million sets, each pass of the garbage collector would take 200 ms, in some hook.
_ONLY = {tier: frozenset((tier,)) for tier in Tier}
_TOKEN = "i"  # `array`'s code for a signed integer of four bytes


@dataclass(frozen=True, slots=True)
class BlockNote:
    """The data that a block's events contain.

    Args:
        parent: the hash of the previous block; None for a prompt's first block.
        tokens: the block's token ids as packed bytes, because a tuple would take eight times the memory.
        adapter: the id and name of the LoRA adapter that computed the block; None without an adapter.
        extra_keys: what the block's hash covers besides tokens and parent, such as digests of images; None if nothing.
        depth: how many blocks of this size precede the block in its prompt.
    """

    parent: bytes | None
    tokens: bytes
    adapter: tuple[int, str] | None = None
    extra_keys: tuple[Any, ...] | None = None
    depth: int = 0

    @property
    def token_ids(self) -> list[int]:
        return array(_TOKEN, self.tokens).tolist()


class BlockNotes:
    """Keeps notes about the blocks that requests compute.

    A note stays after its block has arrived on a tier, because the block may leave and arrive again. Groups with the
    same block size share notes, because vLLM hashes blocks with the same tokens alike in every group.

    Args:
        groups: the groups that are offloaded.
        wire: the event classes and conversions of the installed vLLM.
        is_held: returns whether the device or the host has the block with a given key. If so, kvoffload may still copy
            the block to a tier.

    Attributes:
        awaited: for the key of each block that arrived before its note was taken, the tiers on which the block arrived.
        late: keys in `awaited` whose notes were taken since the last call of `TierEvents.take`.
        by_ratio: for each block size, as a number of hashes, the notes by block hash. The least recently checked note
            comes first.
    """

    def __init__(self, groups: VllmGroups, wire: Wire, is_held: Callable[[BlockKey], bool]) -> None:
        self.awaited: dict[BlockKey, frozenset[Tier]] = {}
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
        block_hash, number = split_key(key)
        return self.by_ratio[self._ratios[number]].get(block_hash)

    def take(self, request: Request, first: int, computed_tokens: int) -> int:
        """Take notes about the blocks whose tokens a request has computed.

        Args:
            request: vLLM's request.
            first: the number of the request's hashes that already have notes.
            computed_tokens: the number of the request's computed tokens. A partly computed block gets no note.

        Returns:
            The number of the request's hashes that have notes now.
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
            notes[block_hash] = BlockNote(parent, packed, adapter, extra_keys, position)
            self._drop_oldest(ratio)
            if self.awaited:
                self.late += [key for key in self._keys(block_hash, ratio) if key in self.awaited]

    def _drop_oldest(self, ratio: int) -> None:
        """If there are too many notes, check the two least recently checked notes.

        A check drops the note if kvoffload can no longer store the note's block. Because each new note causes two
        checks, at least half of the notes are about blocks that kvoffload may still store.
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
        indexes: each tier's index, which records the keys of arriving and leaving blocks.
        wire: the event classes and conversions of the installed vLLM.
        device: vLLM's block pool.
        on_removed: called with this observer's name and its first exception, after which there are no more events.
        kept: for each tier on which an earlier engine may have left blocks, their notes.
        is_adopting: returns whether a tier may still get blocks of an earlier engine.
    """

    def __init__(
        self,
        groups: VllmGroups,
        indexes: Mapping[Tier, KeyIndex],
        wire: Wire,
        device: VllmDevice,
        on_removed: Callable[[str, Exception], object],
        kept: Mapping[Tier, KeptNotes] | None = None,
        is_adopting: Callable[[Tier], bool] = lambda tier: False,
    ) -> None:
        on_host = indexes[Tier.HOST] if len(indexes) > 1 else ()

        def is_held(key: BlockKey) -> bool:
            return device.block_of(key) is not None or key in on_host

        self.notes = BlockNotes(groups, wire, is_held)
        self._wire = wire
        specs = zip(groups.ids, groups.shape.groups, strict=True)
        self._tokens = {number: spec.block_tokens for number, spec in specs}
        self._indexes = indexes
        self._ledgers = {tier: index.watch() for tier, index in indexes.items()}
        self._on_removed = on_removed
        self._is_removed = False
        self._kept = kept or {}
        self._is_adopting = is_adopting
        # For each tier in `kept`: blocks that are not announced yet, by depth, because sorting all of them would take too
        # long in a hook; and the same with parents first.
        self._adopted: dict[Tier, dict[int, list[tuple[SlotId, BlockKey]]]] = {}
        self._announcing: dict[Tier, Iterator[tuple[SlotId, BlockKey]]] = {}

    def note(self, request: Request, first: int, computed_tokens: int) -> int:
        """Take notes about the blocks that a request has computed; see `BlockNotes.take`."""
        if not self._is_removed:
            try:
                return self.notes.take(request, first, computed_tokens)
            except Exception as error:
                self._remove(error)
        return first

    def take(self) -> Iterable[KVCacheEvent]:
        """Return the events about all blocks that arrived or left since the last call."""
        if not self._is_removed:
            try:
                return self._take()
            except Exception as error:
                self._remove(error)
        return ()

    def _remove(self, error: Exception) -> None:
        self._is_removed = True
        for index in self._indexes.values():
            index.unwatch()
        self._on_removed("TierEvents", error)

    def _take(self) -> Iterable[KVCacheEvent]:
        late, awaited = self.notes.late, self.notes.awaited
        if not (late or self._adopted or any(self._ledgers.values())):
            return ()
        events: list[KVCacheEvent] = []
        for tier, ledger in self._ledgers.items():
            arrived = [(key, True) for key in late if tier in awaited.get(key, ())]
            events += self.events(tier, [*arrived, *ledger])
            ledger.clear()
        late.clear()
        for tier in tuple(self._adopted):
            if not self._is_adopting(tier):
                events += self._announce(tier)
        return events

    def _announce(self, tier: Tier) -> Iterator[KVCacheEvent]:
        """Yield the events of some adopted blocks that are still on the tier."""
        notes, adopted = self._kept[tier], self._adopted[tier]
        if tier not in self._announcing:
            self._announcing[tier] = chain.from_iterable([adopted[depth] for depth in sorted(adopted)])
        some = [*islice(self._announcing[tier], _ANNOUNCED)]
        for slot, key in some:
            kept = notes.read(slot, key, self._tokens[split_key(key)[1]])
            is_there = self._indexes[tier].get(key) == slot
            if kept is not None and is_there and self._awaits_no_more(key, tier):
                yield self._stored(tier, key, BlockNote(kept.parent, kept.tokens))
        if len(some) < _ANNOUNCED:
            del self._adopted[tier], self._announcing[tier]
            notes.announced()

    def events(self, tier: Tier, ledger: Iterable[tuple[BlockKey, bool]]) -> Iterator[KVCacheEvent]:
        """Yield one removal event for each group, then one event for each arrived block, parents first.

        A block without a note gets no event: an event without a parent would describe the first block of a prompt.

        Args:
            tier: the tier on which the blocks arrived, or from which the blocks were removed.
            ledger: keys of blocks that arrived (True) or left (False), in order. Only a key's last entry counts.
        """
        came: dict[BlockKey, BlockNote] = {}
        gone: dict[int, list[bytes]] = {}
        for key, has_come in dict(ledger).items():
            note = self.notes.get(key)
            if has_come and note is None:
                self._await(key, tier)
                continue
            was_left_out = self._awaits_no_more(key, tier)
            if has_come and note is not None:
                came[key] = note
                self._keep(tier, key, note)
            elif not was_left_out:
                block_hash, number = split_key(key)
                gone.setdefault(number, []).append(self._wire.hash(block_hash))
        for number, hashes in gone.items():
            yield self._wire.removed(block_hashes=hashes, group_idx=number, **PLACES[tier].where)
        for key in _parents_first(came):
            yield self._stored(tier, key, came[key])

    def _await(self, key: BlockKey, tier: Tier) -> None:
        """Record that a block has arrived without a note. The engine before may have left one."""
        awaited = self.notes.awaited
        awaited[key] = awaited[key] | {tier} if key in awaited else _ONLY[tier]
        slot = self._indexes[tier].get(key)
        if tier in self._kept and tier not in self._announcing and slot is not None:
            depth = self._kept[tier].depth(slot)
            self._adopted.setdefault(tier, {}).setdefault(depth, []).append((slot, key))

    def _keep(self, tier: Tier, key: BlockKey, note: BlockNote) -> None:
        """Keep a block's note for the engine after this one, if events of the block need nothing more."""
        slot = self._indexes[tier].get(key)
        is_plain = note.adapter is None and note.extra_keys is None
        if tier in self._kept and slot is not None and is_plain:
            self._kept[tier].write(slot, key, KeptNote(note.depth, note.parent, note.tokens))

    def _awaits_no_more(self, key: BlockKey, tier: Tier) -> bool:
        """Remove a block's entry for a tier from `awaited`. Return whether there was such an entry."""
        tiers = self.notes.awaited.get(key, ())
        if tier not in tiers:
            return False
        if len(tiers) > 1:
            self.notes.awaited[key] = frozenset(tiers) - {tier}
        else:
            del self.notes.awaited[key]
        return True

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
            **PLACES[tier].where,
        )


@dataclass(frozen=True, slots=True)
class Wire:
    """The event classes and conversions of one vLLM version.

    Args:
        stored, removed: the classes of the two events; they are called with keyword arguments.
        hash: converts a block hash to the form that events use.
        extra_keys: takes a request, the token positions where a block starts and ends, and the index of the request's
            next media item. Returns the block's extra keys, and the index of the first media item after the block.
        kinds: for each of vLLM's group numbers, vLLM's name for the attention kind, and the window size in tokens; the
            size is None without a window.
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    hash: Callable[[bytes], Any]
    extra_keys: Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
    kinds: Mapping[int, tuple[str, int | None]]


def find_wire(kv_cache_config: KVCacheConfig) -> Wire:
    """Return the installed vLLM's event classes and conversions for a KV cache configuration."""
    from vllm.distributed import kv_events
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    # Since 0.31, vLLM hashes tagged extra keys, but an event contains the keys without the tags.
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
    settings: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(settings is not None and settings.enable_kv_cache_events)


def _parents_first(came: Mapping[BlockKey, BlockNote]) -> Iterator[BlockKey]:
    """Yield the keys of all blocks, parents first, because a router drops blocks with unknown parents."""
    rest = dict(came)
    for key in came:
        line: list[BlockKey] = []
        while (note := rest.pop(key, None)) is not None:
            line.append(key)
            key = BlockKey((note.parent or b"") + key[-GROUP_BYTES:])
        yield from reversed(line)
