"""Finds the longest prefix whose blocks are on the device or the host, across groups of every attention kind.

The device has the blocks of D tokens. A hit of L tokens is usable if, in every group, the host has all other blocks
that the token at L reads:

    device    |=========D
    full                [D ................ L)     all of them
    window              [D ..)     [L-w+1 .. L)    the part of the last window after D
    chunked             [D ..)        [c .. L)     the current chunk, from its first token c
    recurrent                         [L-1, L)     the state after the last token

If L lies inside a block, the host needs the tail after exactly L tokens: in each recurrent group the state after L tokens,
and in each full-attention group a block with the KV up to L. The latter may be a whole block.

Each block is looked up once. A missing block rules out all lengths that need it, so the search only moves to shorter
lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, cast

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.request import from_fields
from kvoffload.core.tiers import LayeredIndex
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, SlotId

FoundKeys = KeyIndex | LayeredIndex
"""An index that a search can use. If the index has a key, the key is in `parts[key[0]]`."""


class Match(NamedTuple):
    tokens: int  # how many prompt tokens are on the device or the host
    slots: tuple[SlotId, ...]  # the slots of the blocks to load, heads first
    missing: BlockKey | None  # the first missing key, or None if the limit ended the match
    lacks_state: bool = False  # whether the block of the missing key is a recurrent state
    # in models with recurrent groups: the prefix length that the full-attention groups allow, in tokens; else 0
    full_tokens: int = 0


_match = from_fields(Match)


def longest_match(
    shape: EngineShape,
    keys: Sequence[Sequence[BlockKey]],
    index: FoundKeys,
    start: int,
    limit: int,
    device_tokens: int = 0,
    hashes: Sequence[bytes] = (),
) -> Match:
    """Return the longest usable prefix of at most `limit` tokens, or of `start` tokens if none is longer.

    Args:
        shape: the engine's groups.
        keys: per group, the keys of the request's whole blocks.
        index: finds the slots of keys that can hit.
        start: tokens that the device holds.
        limit: the maximum length of the prefix, in tokens.
        device_tokens: tokens whose full-attention blocks the device holds; more than `start` if the device lacks a
            recurrent state.
        hashes: the request's hashes for tails, if the engine can use hits that end in a tail.
    """
    if shape.is_one_full_group:
        return _match_in_one_full_group(shape.alignment, keys[0], index, start, limit)
    search = _Search(shape, keys, index, start)
    length, blocker = search.descend(search.aligned(limit))
    if hashes and (tail := search.find_tail(hashes, length, limit)):
        length = tail
        if tail > search.full_length:
            blocker = search.full_blocker
            search.lacks_state = False
    full_tokens = 0
    if shape.state_key_ends:
        full_tokens = search.full_length
        if device_tokens > full_tokens:
            behind = _Search(shape, keys, index, device_tokens)
            full_tokens = behind.descend_full(behind.aligned(limit))[0]
    slots = search.slots_for(length) if length > start else ()
    return Match(length, slots, blocker, search.lacks_state, full_tokens)


def _match_in_one_full_group(
    tokens: int, keys: Sequence[BlockKey], index: FoundKeys, start: int, limit: int
) -> Match:
    """Return the blocks before the first missing one, in a model with a single full-attention group."""
    parts, first = index.parts, start // tokens
    found: list[SlotId] = []
    for key in islice(keys, first, limit // tokens):
        slot = parts[key[0]].get(key)
        if slot is None:
            return _match((max((first + len(found)) * tokens, start), tuple(found), key, False, 0))
        found.append(slot)
    return _match((max((first + len(found)) * tokens, start), tuple(found), None, False, 0))


def find_in_tail(
    shape: EngineShape,
    group: GroupSpec,
    keys: Sequence[BlockKey],
    hashes: Sequence[bytes],
    tokens: int,
    index: FoundKeys,
) -> SlotId | None:
    """Return the slot of a group's last block for a hit that ends inside this block, or None if the index lacks it.

    A whole block of attention has the KV of its first tokens, too. A recurrent state must be the state after exactly
    `tokens` tokens.
    """
    position = tokens // group.block_tokens
    usable = [shape.tail_key(group, hashes, tokens)]
    if group.kind is not AttentionKind.RECURRENT and position < len(keys):
        usable.insert(0, keys[position])
    found = [index.parts[key[0]].get(key) for key in usable if key is not None]
    return next((slot for slot in found if slot is not None), None)


class _Search:
    def __init__(
        self,
        shape: EngineShape,
        keys: Sequence[Sequence[BlockKey]],
        index: FoundKeys,
        start: int,
    ) -> None:
        self._shape = shape
        self._groups = shape.groups
        self._alignment = shape.alignment
        self._keys = keys
        self._index = index
        self._parts = index.parts
        self._start = start
        self._found: tuple[dict[int, SlotId], ...] = tuple({} for _ in shape.groups)
        self.full_length = start
        """The length of the hit if only the full-attention groups mattered."""
        self.full_blocker: BlockKey | None = None
        """The first missing key after `full_length`, or None if the limit ended this length."""
        self.lacks_state = False
        """Whether a missing recurrent state ruled out the next longer length."""

    def descend(self, length: int) -> tuple[int, BlockKey | None]:
        """Return the longest usable length up to `length`, and the first missing key after that length."""
        length, blocker = self.descend_full(length)
        self.full_length = length
        self.full_blocker = blocker
        moved = True
        while moved and length > self._start:
            moved = False
            for group in self._groups:
                if (
                    group.kind is not AttentionKind.FULL
                    and (hole := self._last_hole(group, length)) is not None
                ):
                    blocker = self._key(group, hole * group.block_tokens)
                    self.lacks_state = group.kind is AttentionKind.RECURRENT
                    length = self.aligned(hole * group.block_tokens - self._behind(group))
                    moved = True
        return max(length, self._start), blocker

    def descend_full(self, length: int) -> tuple[int, BlockKey | None]:
        """Return the longest length up to `length` that the full-attention groups allow, and the first missing key."""
        blocker: BlockKey | None = None
        for group in self._groups:
            if group.kind is AttentionKind.FULL and (cut := self._extend(group, length)) < length:
                length, blocker = cut, self._key(group, cut)
        return length, blocker

    def find_tail(self, hashes: Sequence[bytes], length: int, limit: int) -> int:
        """Return the length of the longest usable hit that ends in a tail and is longer than `length`; 0 if there is none.

        The attention blocks before the tail must be there, so the tail ends at most one block after `full_length`.
        """
        size, unit, parts = self._alignment, self._shape.tail_tokens, self._parts
        last = min(limit, self.full_length + size - 1, len(hashes) * unit) // unit
        state_end = next(group.key_end for group in self._groups if group.kind is AttentionKind.RECURRENT)
        for number in range(last, length // unit, -1):
            tokens, key = number * unit, hashes[number - 1] + state_end
            if (
                tokens % size
                and parts[key[0]].get(BlockKey(key)) is not None
                and self._ends_in(tokens, hashes)
            ):
                return tokens
        return 0

    def _ends_in(self, tokens: int, hashes: Sequence[bytes]) -> bool:
        """Return whether all groups have their block of a tail, and use these blocks for the hit."""
        slots = [
            find_in_tail(self._shape, group, keys, hashes, tokens, self._index)
            for group, keys in zip(self._groups, self._keys, strict=True)
        ]
        if None in slots:
            return False
        for found, slot in zip(self._found, slots, strict=True):
            found[tokens // self._alignment] = cast("SlotId", slot)
        return True

    def slots_for(self, length: int) -> tuple[SlotId, ...]:
        """Return the slots to load for a usable length, heads first."""
        end = length + -length % self._alignment
        if len(self._groups) == 1:
            found = self._found[0]
            return tuple([found[position] for position in self._needed(self._groups[0], length, end)])
        blocks = [
            (position * group.block_tokens, found[position])
            for group, found in zip(self._groups, self._found, strict=True)
            for position in self._needed(group, length, end)
        ]
        blocks.sort(key=itemgetter(0))
        return tuple([slot for _, slot in blocks])

    def aligned(self, length: int) -> int:
        """Round a number of tokens down to a multiple of `EngineShape.alignment`."""
        return length - length % self._alignment

    def _extend(self, group: GroupSpec, limit: int) -> int:
        """Look up a full-attention group's keys after the device's hit. Return the longest hit up to `limit` tokens."""
        tokens, keys = group.block_tokens, self._keys[group.group]
        first = self._start // tokens
        last = min((limit + self._behind(group)) // tokens, len(keys))
        parts, found = self._parts, self._found[group.group]
        position = first
        for position, key in enumerate(keys[first:last], first):
            slot = parts[key[0]].get(key)
            if slot is None:
                break
            found[position] = slot
        else:
            position = max(first, last)
        return min(limit, self.aligned(position * tokens - self._behind(group)))

    def _last_hole(self, group: GroupSpec, length: int) -> int | None:
        """Return the position of the deepest missing block that a hit of `length` tokens needs, or None.

        A block is missing if neither the host nor the device has it.
        """
        if length <= self._start:
            return None
        keys, found, parts = self._keys[group.group], self._found[group.group], self._parts
        for position in reversed(self._needed(group, length, length + self._behind(group))):
            if position in found:
                continue
            key = keys[position] if position < len(keys) else None
            slot = None if key is None else parts[key[0]].get(key)
            if slot is None:
                return position
            found[position] = slot
        return None

    def _needed(self, group: GroupSpec, length: int, end: int) -> range:
        """Return the positions of blocks before token `end` that a hit of `length` tokens needs from the host."""
        first = max(group.first_needed_token(length), self._start)
        return range(first // group.block_tokens, end // group.block_tokens)

    def _key(self, group: GroupSpec, token: int) -> BlockKey | None:
        """Return the key of the first missing block at or after `token`; None if that block has no key yet."""
        keys, found = self._keys[group.group], self._found[group.group]
        position = max(token, self._start) // group.block_tokens
        while position in found:
            position += 1
        return keys[position] if position < len(keys) else None

    def _behind(self, group: GroupSpec) -> int:
        """Return how many tokens after a hit must also match: one block's if a draft model looks ahead, else 0."""
        return group.block_tokens if group.has_lookahead else 0
