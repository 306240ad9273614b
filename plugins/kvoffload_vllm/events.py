"""KV cache events for routers: which blocks have come to the host, and which have left it.

What an event says of a block beyond its hash is known only while its request lives. So it is noted when the core is told
of the block; here, not in the core, and only where vLLM publishes events, as token ids are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvoffload.model.ids import BlockKey, GroupId
from kvoffload_vllm.groups import VllmGroups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent

_GROUP_BYTES = 4
_MEDIUM = "CPU"
_LOCAL = "LOCAL"  # the block is on the machine that tells of it


class RequestLike(Protocol):
    """What is read of vLLM's `Request`."""

    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    lora_request: Any


@dataclass(frozen=True, slots=True)
class BlockNote:
    """What a router wants to know of a block.

    Args:
        parent: hash of the block before it, None for a prompt's first.
        token_ids: its tokens.
        lora_id, lora_name: the adapter that it was computed with.
    """

    parent: bytes | None
    token_ids: tuple[int, ...]
    lora_id: int | None = None
    lora_name: str | None = None


class BlockNotes:
    """Notes by key, the most recent ones: a block without a note is told of by its hash alone.

    Args:
        groups: the groups that are offloaded.
        limit: how many notes.
    """

    def __init__(self, groups: VllmGroups, limit: int) -> None:
        self._groups = groups
        self._limit = limit
        self._notes: dict[BlockKey, BlockNote] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def take(self, request: RequestLike, keys: Sequence[Sequence[BlockKey]], first: Sequence[int]) -> None:
        """Note a request's blocks when the core is told their keys.

        Args:
            request: vLLM's.
            keys: per group, the new ones.
            first: per group, the position of the first of them.
        """
        for group, new, start in zip(self._groups.shape.groups, keys, first, strict=True):
            for position, key in enumerate(new, start):
                self._notes.pop(key, None)
                self._notes[key] = self._note(request, group.group, group.block_tokens, position)
        while len(self._notes) > self._limit:
            del self._notes[next(iter(self._notes))]

    def get(self, key: BlockKey) -> BlockNote | None:
        """Return a block's note; it is kept, as the block may leave the host and come again."""
        return self._notes.get(key)

    def _note(self, request: RequestLike, group: GroupId, tokens: int, position: int) -> BlockNote:
        lora = request.lora_request
        return BlockNote(
            request.block_hashes[self._groups.last_hash(group, position - 1)] if position else None,
            tuple(request.all_token_ids[position * tokens : (position + 1) * tokens]),
            lora.adapter_id if lora else None,
            lora.name if lora else None,
        )


class EventMaker:
    """Makes vLLM's events.

    Args:
        groups: the groups that are offloaded.
        notes: what is known of blocks.
        wire: how vLLM writes events.
    """

    def __init__(self, groups: VllmGroups, notes: BlockNotes, wire: Wire) -> None:
        specs = zip(groups.ids, groups.shape.groups, strict=True)
        self._tokens = {number: spec.block_tokens for number, spec in specs}
        self._notes = notes
        self._wire = wire

    def events(self, ledger: Iterable[tuple[BlockKey, bool]]) -> Iterator[KVCacheEvent]:
        """Yield one event for each block that is on the host now, and one a group for those that are not.

        Args:
            ledger: what came (True) and what left, in the order in which it happened; of a key the last entry holds.
        """
        latest = dict(ledger)
        gone: dict[int, list[bytes]] = {}
        for key, came in latest.items():
            if not came:
                block_hash, number = split_key(key)
                gone.setdefault(number, []).append(block_hash)
        for number, hashes in gone.items():
            yield self._wire.removed(
                block_hashes=list(map(self._wire.hash, hashes)),
                medium=self._wire.medium,
                group_idx=number,
                locality=_LOCAL,
            )
        for key, came in latest.items():
            if came:
                yield self._stored(key)

    def _stored(self, key: BlockKey) -> KVCacheEvent:
        block_hash, number = split_key(key)
        note = self._notes.get(key) or BlockNote(None, ())
        return self._wire.stored(
            block_hashes=[self._wire.hash(block_hash)],
            parent_block_hash=self._wire.hash(note.parent) if note.parent is not None else None,
            token_ids=list(note.token_ids),
            block_size=self._tokens[number],
            lora_id=note.lora_id,
            lora_name=note.lora_name,
            medium=self._wire.medium,
            group_idx=number,
            locality=_LOCAL,
        )


@dataclass(frozen=True, slots=True)
class Wire:
    """How one version of vLLM writes events.

    Args:
        stored, removed: make an event from keywords.
        hash: how a block hash is written.
        medium: how host memory is called.
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    hash: Callable[[bytes], Any]
    medium: str = _MEDIUM


def find_wire() -> Wire:
    """Return how the installed vLLM writes events."""
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return Wire(
        stored=_known_fields_only(kv_events.BlockStored),
        removed=_known_fields_only(kv_events.BlockRemoved),
        hash=maybe_convert_block_hash,
        medium=getattr(kv_events, "MEDIUM_CPU", _MEDIUM),
    )


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether this engine publishes KV cache events at all."""
    settings: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(settings is not None and settings.enable_kv_cache_events)


def split_key(key: BlockKey) -> tuple[bytes, int]:
    """Return a key's block hash and vLLM's number of its group."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def _known_fields_only(cls: Callable[..., object]) -> Callable[..., Any]:
    known: Collection[str] = cls.__struct_fields__  # type: ignore[attr-defined]  # vLLM's events are msgspec's

    def make(**fields: object) -> object:
        return cls(**{name: value for name, value in fields.items() if name in known})

    return make
