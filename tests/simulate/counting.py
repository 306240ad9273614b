"""A model that detects every wrong byte: each KV cell contains a number computed from all tokens up to the
cell's token.

A token's number depends on the tokens before it and on the weights' version. The cells written for a token
differ between groups and tensors, and so between ranks. A step reads every cell that its tokens attend to
from the engine's real blocks, of each replica, checks the cell, and computes the new token from all cells. In a recurrent
state, every cell of a block contains the last token's number plus the cell's index. A step reads the previous
state, and passes an error in that state on to the next state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvoffload.engine.groups import first_visible
from kvoffload.engine.request import Request, RequestState, Token
from kvoffload.engine.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvoffload.engine.config import EngineConfig
    from kvoffload.engine.plugin import GroupFacts
    from kvoffload.engine.scheduler import Batch, Chunk

VOCABULARY = 2**31 - 1
_MASK = 2**64 - 1
# The golden ratio in 64 bits; multiplying by it maps neighbouring numbers far apart.
_ODD = 0x9E3779B97F4A7C15

Numbers = "NDArray[np.uint64]"


def chain(tokens: Sequence[int], weights: int, known: Sequence[int] = ()) -> list[int]:
    """Return one number per token, computed from it and all tokens before it. Continue `known`, if given."""
    found = list(known)
    last = found[-1] if found else (weights + 1) * _ODD & _MASK
    for token in tokens[len(found) :]:
        last = (last ^ token) * _ODD & _MASK
        last ^= last >> 29
        found.append(last)
    return found


def cells(numbers: NDArray[np.uint64], tensor: int, group: int) -> NDArray[np.uint64]:
    """Return a tensor's cells for the tokens with these numbers."""
    return numbers * np.uint64(2 * (tensor * 16 + group) + 1)


def state(number: int, tensor: int, group: int, size: int) -> NDArray[np.uint64]:
    """Return a tensor's block with the state after the token with this number; 0 means no token yet."""
    return cells(np.array([number], np.uint64), tensor, group) + np.arange(size).astype(np.uint64)


def expected(
    groups: Sequence[GroupFacts], tensors: int, prompt: Sequence[int], new_tokens: int, weights: int
) -> list[int]:
    """Return the tokens that the engine must produce if all KV is correct."""
    tokens, numbers = list(prompt), chain(prompt, weights)
    for _ in range(new_tokens):
        end = len(tokens)
        seen = np.array(numbers, np.uint64)
        total = sum(
            int(cells(seen[_first_read(group, end - 1) :], tensor, group.index).sum())
            for group in groups
            for tensor in range(tensors)
        )
        tokens.append(_token(total))
        numbers = chain(tokens, weights, numbers)
    return tokens[len(prompt) :]


class CountingRunner(Runner):
    """Replaces the transformer, and records every cell with a wrong value in `wrong`.

    It calls `computing` once per step to let time pass.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[GroupFacts],
        num_blocks: int,
        computing: Callable[[], object] = lambda: None,
    ) -> None:
        self._replicas = config.replicas
        self._stages = config.stages
        self._attention = [group for group in groups if group.kind != "recurrent"]
        self._recurrent = [group for group in groups if group.kind == "recurrent"]
        self._size = config.block_tokens
        self._computing = computing
        shape = (num_blocks, config.block_tokens)
        self.kv_tensors = [
            [torch.zeros(shape, dtype=torch.int64) for _ in range(config.model.layers_per_group)]
            for _ in range(config.replicas)
        ]
        # of all replicas, the number and the pages of each tensor
        self._pages: list[tuple[int, NDArray[np.uint64]]] = [
            (number, tensor.numpy().view(np.uint64))
            for replica in self.kv_tensors
            for number, tensor in enumerate(replica)
        ]
        self.weights = 0
        self.wrong: list[str] = []
        self._numbers: dict[Request, list[int]] = {}
        self._sampled: list[Token] = []

    def launch(self, batch: Batch) -> torch.Tensor:
        live = {one: known for one, known in self._numbers.items() if one.state is not RequestState.ENDED}
        for request in (chunk.request for chunk in batch.chunks):
            live[request] = chain(request.tokens, self.weights, live.get(request, []))
        self._numbers = live
        for chunk in batch.chunks:
            self._write(chunk)
        states = list(map(self._continue_states, batch.chunks))
        totals = zip(map(self._read, batch.chunks), states, batch.chunks, strict=True)
        self._sampled = [Token(_token(read + own), 0.0) for read, own, chunk in totals if chunk.samples]
        self._computing()
        return torch.empty(0)

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[Token]:
        return self._sampled

    def _write(self, chunk: Chunk) -> None:
        numbers = np.array(self._numbers[chunk.request][chunk.start : chunk.end], np.uint64)
        for group in self._attention:
            places = self._places(chunk, group, chunk.start)
            for tensor, pages in self._pages:
                pages.reshape(-1)[places] = cells(numbers, tensor, group.index)

    def _continue_states(self, chunk: Chunk) -> int:
        """Read the state from which each recurrent group continues, and write the next state.

        Return the sum of the written states.
        """
        numbers, total = self._numbers[chunk.request], 0
        for group in self._recurrent:
            table = chunk.request.tables[group.index]
            write = table[(chunk.end - 1) // self._size]
            # within a block, a step updates the state in place
            read = write if chunk.start % self._size else table[chunk.start // self._size - 1]
            for tensor, pages in self._pages:
                new, wrong = state(numbers[chunk.end - 1], tensor, group.index, self._size), np.uint64(0)
                if chunk.start:
                    should = state(numbers[chunk.start - 1], tensor, group.index, self._size)
                    if not np.array_equal(pages[read], should):
                        self._note(chunk, group, tensor, chunk.start - 1, read)
                        wrong = (pages[read] - should)[pages[read] != should][0]
                pages[write] = new + wrong
                total += int(pages[write][0])
        return total // self._replicas

    def _read(self, chunk: Chunk) -> int:
        """Read the cells that the chunk attends to; compute and return the last token's number from them."""
        numbers = np.array(self._numbers[chunk.request][: chunk.end], np.uint64)
        total = 0
        for group in self._attention:
            first = first_visible(group, chunk.start)
            places = self._places(chunk, group, first)
            last_sees = first_visible(group, chunk.end - 1) - first
            for tensor, pages in self._pages:
                found = pages.reshape(-1)[places]
                should = cells(numbers[first:], tensor, group.index)
                if not np.array_equal(found, should):
                    token = first + int(np.flatnonzero(found != should)[0])
                    block = chunk.request.tables[group.index][token // self._size]
                    self._note(chunk, group, tensor, token, block)
                total += int(found[last_sees:].sum())
        return total // self._replicas

    def _places(self, chunk: Chunk, group: GroupFacts, first: int) -> NDArray[np.int64]:
        tokens = np.arange(first, chunk.end)
        table = np.array(chunk.request.tables[group.index], np.int64)
        places: NDArray[np.int64] = table[tokens // self._size] * self._size + tokens % self._size
        return places

    def _note(self, chunk: Chunk, group: GroupFacts, tensor: int, token: int, block: int) -> None:
        self.wrong.append(
            f"{chunk.request.request_id} read wrong KV of token {token}: group {group.index}, tensor {tensor}, "
            f"block {block}"
        )


def _first_read(group: GroupFacts, position: int) -> int:
    """Return the first token whose number is needed to compute the token at `position`.

    A recurrent group needs only the state before that token.
    """
    return position if group.kind == "recurrent" else first_visible(group, position)


def _token(total: int) -> int:
    return total % (2**61 - 1) % VOCABULARY
