"""A step's batch as tensors: the rows of each request, the blocks for new KV, and the tokens each row may attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvoffload.engine.groups import first_visible

if TYPE_CHECKING:
    from kvoffload.engine.plugin import GroupFacts
    from kvoffload.engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """The blocks and tokens that one request's rows read in one group.

    The rows together see the tokens [first_key, end), which lie in the blocks from position
    `first_key // block_tokens` on.
    """

    rows: slice  # the request's rows among the step's tokens
    blocks: torch.Tensor  # int64 [pages]
    keys: slice  # the visible tokens, as a slice of the pages' tokens
    mask: torch.Tensor | None  # [rows, keys], 0 or -inf, added to the scores; if None, is_causal applies
    # If there is no mask: True if the rows and the keys are the same tokens, False if every row attends to every key.
    is_causal: bool


@dataclass(frozen=True, slots=True)
class StateSpan:
    """The blocks from which one request's rows read a recurrent state, and to which these rows write the state."""

    rows: slice  # the request's rows among the step's tokens
    read_block: int | None  # the block with the state; None if the state starts at zero
    write_block: int


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """One attention group's input for a step."""

    write_blocks: torch.Tensor  # int64 [tokens]: the block to which each new token's KV is written
    # int64 [tokens]: each new token's offset in the block to which its KV is written
    write_offsets: torch.Tensor
    spans: tuple[Span, ...]


# The input of one group for a step. A recurrent group has one span per request.
GroupInput = AttentionInput | tuple[StateSpan, ...]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Everything the model needs for one step. All tensors are on the model's device."""

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sample_rows: torch.Tensor  # int64 [samples]: the last row of each chunk that samples
    groups: tuple[GroupInput, ...]


class InputMaker:
    """Makes the tensors of a step. Tokens are in the order of the step's chunks."""

    def __init__(self, groups: Sequence[GroupFacts], device: torch.device, dtype: torch.dtype) -> None:
        self._groups = groups
        self._device = device
        self._dtype = dtype

    def make(self, chunks: Sequence[Chunk]) -> BatchInput:
        """Return the tensors for one step, which has at least one chunk."""
        rows = _rows(chunks)
        token_ids = [token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.end]]
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        samples = [row.stop - 1 for row, chunk in zip(rows, chunks, strict=True) if chunk.samples]
        masks = self._masks(chunks)
        return BatchInput(
            self._to_device(token_ids),
            positions.to(self._device),
            self._to_device(samples),
            tuple(self._group_input(group, chunks, rows, masks[group.kind]) for group in self._groups),
        )

    def _group_input(
        self, group: GroupFacts, chunks: Sequence[Chunk], rows: Sequence[slice], masks: _Masks
    ) -> GroupInput:
        if group.kind == "recurrent":
            return tuple(_state_span(group, *parts) for parts in zip(chunks, rows, strict=True))
        size = group.block_tokens
        blocks: list[int] = []
        for chunk in chunks:
            table = chunk.request.tables[group.index]
            blocks += [table[token // size] for token in range(chunk.start, chunk.end)]
        offsets = [token % size for chunk in chunks for token in range(chunk.start, chunk.end)]
        spans = tuple(self._span(group, *parts) for parts in zip(chunks, rows, masks, strict=True))
        return AttentionInput(self._to_device(blocks), self._to_device(offsets), spans)

    def _span(self, group: GroupFacts, chunk: Chunk, rows: slice, mask: torch.Tensor | None) -> Span:
        first_key = first_visible(group, chunk.start)
        first_block = first_key // group.block_tokens
        skipped = first_block * group.block_tokens
        table = chunk.request.tables[group.index][first_block : -(-chunk.end // group.block_tokens)]
        keys = slice(first_key - skipped, chunk.end - skipped)
        return Span(rows, self._to_device(table), keys, mask, _is_causal(group, chunk))

    def _masks(self, chunks: Sequence[Chunk]) -> dict[str, _Masks]:
        """Return the masks of all chunks, by group kind, because groups of the same kind share masks."""
        kinds = {group.kind: group for group in self._groups}
        return {kind: [self._mask(group, chunk) for chunk in chunks] for kind, group in kinds.items()}

    def _mask(self, group: GroupFacts, chunk: Chunk) -> torch.Tensor | None:
        if _is_causal(group, chunk) or chunk.end - chunk.start == 1 or group.kind == "recurrent":
            return None  # A single row attends to all keys of its span.
        rows = torch.arange(chunk.start, chunk.end)
        keys = torch.arange(first_visible(group, chunk.start), chunk.end)
        lowest = torch.tensor([first_visible(group, row) for row in range(chunk.start, chunk.end)])
        is_hidden = (keys > rows[:, None]) | (keys < lowest[:, None])
        # The mask is added to the scores, because torch would convert a boolean mask again in every layer.
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype).masked_fill_(is_hidden, float("-inf"))
        return mask.to(self._device)

    def _to_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)


_Masks = Sequence[torch.Tensor | None]


def _state_span(group: GroupFacts, chunk: Chunk, rows: slice) -> StateSpan:
    """Return a chunk's span. A state inside a block is overwritten in place; a state at a block's end is kept."""
    table, size = chunk.request.tables[group.index], group.block_tokens
    write = table[(chunk.end - 1) // size]
    read = write if chunk.start % size else table[chunk.start // size - 1]
    return StateSpan(rows, read if chunk.start else None, write)


def _is_causal(group: GroupFacts, chunk: Chunk) -> bool:
    return group.kind == "full" and chunk.start == 0


def _rows(chunks: Sequence[Chunk]) -> list[slice]:
    rows: list[slice] = []
    start = 0
    for chunk in chunks:
        rows.append(slice(start, start + chunk.end - chunk.start))
        start = rows[-1].stop
    return rows
