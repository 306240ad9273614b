"""KV cache events for routers: which blocks have come to the host or to a tier below it, and which have left it.

What an event says of a block beyond its hash is known only while its request lives, and a block may be stored long after.
So a note of it is taken when it is computed or loaded, and kept while it may still come to a tier; here, not in the core, and only
where vLLM publishes events, as token ids are in it. A block that comes before its note, from a disk or a store where another process
has put it, is published when the note is taken. Of the remote tier the events say what this engine knows: what it wrote
there, and what the store said it has when it was asked.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.model.ids import BlockKey
from kvoffload.model.wire import Tier
from kvoffload_vllm.groups import VllmGroups
from kvoffload_vllm.pool_device import GROUP_BYTES, group_suffix, split_key
from kvoffload_vllm.progress import RequestLike

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvoffload.core.key_index import KeyIndex
    from kvoffload_vllm.pool_device import VllmDevice

_HOST, _STORAGE = "CPU", "STORAGE"
_LOCAL, _REMOTE = "LOCAL", "REMOTE"  # to the machine that reports it
_TOKEN = "i"  # four bytes a token


@dataclass(frozen=True, slots=True)
class BlockNote:
    """What a router wants to know of a block.

    Args:
        parent: hash of the block before it, None for a prompt's first.
        tokens: its tokens, packed: as a tuple they would take eight times as much.
        adapter: id and name of the adapter that it was computed with.
        extra_keys: what else its hash covers.
    """

    parent: bytes | None
    tokens: bytes
    adapter: tuple[int, str] | None = None
    extra_keys: tuple[Any, ...] | None = None

    @property
    def token_ids(self) -> list[int]:
        return array(_TOKEN, self.tokens).tolist()


class BlockNotes(OrderedDict[bytes, BlockNote]):
    """Notes of blocks of one size, by block hash, those that were looked at longest ago first.

    A note is kept when its block comes to a tier, as the block may leave it and come again. Groups whose blocks have one
    size share notes: blocks that end with the same token have one hash.

    Args:
        limit: up to this many notes, none is dropped.
        is_needed: whether a block with this hash may yet come to a tier.
    """

    def __init__(self, limit: int, is_needed: Callable[[bytes], bool]) -> None:
        super().__init__()
        self._limit = limit
        self._is_needed = is_needed

    def add(self, block_hash: bytes, note: BlockNote) -> None:
        """Keep a note of a block that has none."""
        self[block_hash] = note
        # Looking at two for each one added finds those no longer needed before there are twice as many.
        for _ in range(2):
            if len(self) > self._limit:
                oldest, its_note = self.popitem(last=False)
                if self._is_needed(oldest):
                    self[oldest] = its_note


class NoteTaker:
    """Takes notes of the blocks that requests compute.

    Args:
        groups: the groups that are offloaded.
        wire: how vLLM writes events.
        is_held: whether a key lies where it can be copied to a tier from: on the device, whose copies under way keep it
            from forgetting, or on the host.

    Attributes:
        awaited: keys that came to tiers without a note, and the tiers.
        late: those of them whose note was taken since.
    """

    def __init__(self, groups: VllmGroups, wire: Wire, is_held: Callable[[BlockKey], bool]) -> None:
        self.awaited: dict[BlockKey, set[Tier]] = {}
        self.late: list[BlockKey] = []
        self._wire = wire
        self._hash_tokens = groups.hash_tokens
        self._suffixes: dict[int, list[bytes]] = {}
        self._notes: dict[int, BlockNotes] = {}
        self._notes_of_group: dict[int, BlockNotes] = {}
        for ratio in dict.fromkeys(groups.hash_ratios):
            numbers = [
                number for number, own in zip(groups.ids, groups.hash_ratios, strict=True) if own == ratio
            ]
            is_needed = _any_of(numbers, is_held)
            self._suffixes[ratio] = [group_suffix(number) for number in numbers]
            self._notes[ratio] = BlockNotes(groups.shape.device_blocks, is_needed)
            self._notes_of_group.update(dict.fromkeys(numbers, self._notes[ratio]))

    def __len__(self) -> int:
        return sum(map(len, self._notes.values()))

    def get(self, key: BlockKey) -> BlockNote | None:
        """Return a block's note."""
        block_hash, number = split_key(key)
        return self._notes_of_group[number].get(block_hash)

    def awaits(self, key: BlockKey, tier: Tier) -> bool:
        """Whether a key came to a tier without a note, and was not published."""
        return tier in self.awaited.get(key, ())

    def awaits_no_more(self, key: BlockKey, tier: Tier) -> None:
        """Note that such a key is published, or has left the tier."""
        self.awaited[key].discard(tier)
        if not self.awaited[key]:
            del self.awaited[key]

    def take(self, request: RequestLike, first: int, computed_tokens: int) -> int:
        """Note the blocks that hold a request's computed tokens.

        Args:
            request: vLLM's.
            first: of its hashes those before this one were noted.
            computed_tokens: only whole blocks of these are noted.

        Returns:
            How many of its hashes are noted now.
        """
        last = min(computed_tokens // self._hash_tokens, len(request.block_hashes))
        if last <= first:
            return first
        lora = request.lora_request
        adapter = (lora.adapter_id, lora.name) if lora else None
        for ratio, notes in self._notes.items():
            self._take(request, adapter, range(first // ratio, last // ratio), ratio, notes)
        return last

    def _take(
        self,
        request: RequestLike,
        adapter: tuple[int, str] | None,
        positions: range,
        ratio: int,
        notes: BlockNotes,
    ) -> None:
        hashes, tokens, media = request.block_hashes, ratio * self._hash_tokens, 0
        for position in positions:
            block_hash = hashes[(position + 1) * ratio - 1]
            if block_hash in notes:
                continue
            start, end = position * tokens, (position + 1) * tokens
            extra_keys, media = self._wire.extra_keys(request, start, end, media)
            parent = hashes[position * ratio - 1] if position else None
            packed = array(_TOKEN, request.all_token_ids[start:end]).tobytes()
            notes.add(block_hash, BlockNote(parent, packed, adapter, extra_keys))
            if self.awaited:
                self._look_for_awaited(block_hash, ratio)

    def _look_for_awaited(self, block_hash: bytes, ratio: int) -> None:
        for suffix in self._suffixes[ratio]:
            if (key := BlockKey(block_hash + suffix)) in self.awaited:
                self.late.append(key)


class EventMaker:
    """Makes vLLM's events of one tier.

    Args:
        groups: the groups that are offloaded.
        notes: what is known of blocks.
        wire: how vLLM writes events.
        tier: where the blocks are.
    """

    def __init__(self, groups: VllmGroups, notes: NoteTaker, wire: Wire, tier: Tier = Tier.HOST) -> None:
        specs = zip(groups.ids, groups.shape.groups, strict=True)
        self._tokens = {number: spec.block_tokens for number, spec in specs}
        self._notes = notes
        self._wire = wire
        self._place = {
            "medium": _HOST if tier is Tier.HOST else _STORAGE,
            "locality": _REMOTE if tier is Tier.REMOTE else _LOCAL,
        }
        self._tier = tier

    def events(self, ledger: Iterable[tuple[BlockKey, bool]]) -> Iterator[KVCacheEvent]:
        """Yield an event a group for the blocks that left the tier, and one for each block that came, parents first.

        A block without a note is left out, and so is its end: with no parent it would read as a prompt's first.

        Args:
            ledger: what came (True) and what left, in the order in which it happened; of a key the last entry holds.
        """
        came: dict[BlockKey, BlockNote] = {}
        gone: dict[int, list[bytes]] = {}
        for key, has_come in dict(ledger).items():
            was_left_out, note = self._notes.awaits(key, self._tier), self._notes.get(key)
            if has_come and note is None:
                self._notes.awaited.setdefault(key, set()).add(self._tier)
                continue
            if was_left_out:
                self._notes.awaits_no_more(key, self._tier)
            if has_come and note is not None:
                came[key] = note
            elif not was_left_out:
                block_hash, number = split_key(key)
                gone.setdefault(number, []).append(block_hash)
        for number, hashes in gone.items():
            yield self._removed(number, hashes)
        for key in _parents_first(came):
            yield self._stored(key, came[key])

    def _removed(self, number: int, hashes: Iterable[bytes]) -> KVCacheEvent:
        return self._wire.removed(
            block_hashes=list(map(self._wire.hash, hashes)), group_idx=number, **self._place
        )

    def _stored(self, key: BlockKey, note: BlockNote) -> KVCacheEvent:
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
            **self._place,
        )


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
            (tier, EventMaker(groups, self._notes, wire, tier), index.watch())
            for tier, index in indexes.items()
        ]
        self._ledgers = [ledger for *_, ledger in self._tiers]

    def note(self, request: RequestLike, first: int, computed_tokens: int) -> int:
        """Note a request's computed blocks but for those of its first hashes; return how many hashes are noted now."""
        return self._notes.take(request, first, computed_tokens)

    def take(self) -> Iterable[KVCacheEvent]:
        """Return what happened since the last call."""
        late = self._notes.late
        if not (late or any(self._ledgers)):
            return ()
        events: list[KVCacheEvent] = []
        for tier, maker, ledger in self._tiers:
            arrived = [(key, True) for key in late if self._notes.awaits(key, tier)]
            events += maker.events([*arrived, *ledger])
            ledger.clear()
        late.clear()
        return events


@dataclass(frozen=True, slots=True)
class Wire:
    """How one version of vLLM writes events.

    Args:
        stored, removed: make an event from keywords.
        hash: how a block hash is written.
        extra_keys: returns, for a request and its tokens from one up to another, what else their hash covers; goes
            through the request's media, from a number on, and returns the next one too.
        kinds: per number of a group, what its attention is called, and its window if it has one.
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    hash: Callable[[bytes], Any]
    extra_keys: Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
    kinds: Mapping[int, tuple[str, int | None]]


def find_wire(kv_cache_config: KVCacheConfig) -> Wire:
    """Return how the installed vLLM writes events of these groups."""
    from vllm.distributed import kv_events
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    # Since 0.31 hashes cover tagged values, which events leave untagged.
    untag = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)

    def extra_keys(
        request: RequestLike, start: int, end: int, media: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, media = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, media)
        return untag([keys])[0] if keys else None, media

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return Wire(
        stored=_known_fields_only(kv_events.BlockStored),
        removed=_known_fields_only(kv_events.BlockRemoved),
        hash=kv_cache_utils.maybe_convert_block_hash,
        extra_keys=extra_keys,
        kinds={
            number: (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for number, spec in enumerate(specs)
        },
    )


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether this engine publishes KV cache events at all."""
    settings: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(settings is not None and settings.enable_kv_cache_events)


def _any_of(numbers: Sequence[int], holds: Callable[[BlockKey], bool]) -> Callable[[bytes], bool]:
    """Return whether any of these groups has a block with a hash."""
    suffixes = [group_suffix(number) for number in numbers]
    return lambda block_hash: any(holds(BlockKey(block_hash + suffix)) for suffix in suffixes)


def _parents_first(came: Mapping[BlockKey, BlockNote]) -> Iterator[BlockKey]:
    """A router drops a block whose parent it does not know."""
    rest = dict(came)
    for key in came:
        line: list[BlockKey] = []
        while (note := rest.pop(key, None)) is not None:
            line.append(key)
            key = BlockKey((note.parent or b"") + key[-GROUP_BYTES:])
        yield from reversed(line)


def _known_fields_only(cls: Callable[..., object]) -> Callable[..., Any]:
    known: Collection[str] = cls.__struct_fields__  # type: ignore[attr-defined]  # vLLM's events are msgspec's

    def make(**fields: object) -> object:
        return cls(**{name: value for name, value in fields.items() if name in known})

    return make
