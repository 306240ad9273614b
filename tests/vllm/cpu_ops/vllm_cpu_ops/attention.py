"""Attention over a paged cache in plain torch: causal, with grouped queries, a sliding window and a soft cap.

The caches have the shape `[blocks, kv heads, tokens of a block, head size]`, and may be views with gaps
between blocks. Requests that decode one token are computed together, and all other requests one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Pages:
    """A layer's paged cache, and the parameters of its attention."""

    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int  # How many tokens a query sees, including its own. 0 or less means all tokens.
    softcap: float
    causal: bool

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def gather(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks' keys and values, both `[requests, kv heads, n * block tokens, head size]`."""
        return _laid_out(self.keys[block_ids]), _laid_out(self.values[block_ids])

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether the token at position `query` attends to the token at position `key`."""
        seen = key <= query if self.causal else torch.ones_like(key <= query)
        return seen & (query - key < self.window) if self.window > 0 else seen


def store(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the tokens' keys and values to their cache slots. Negative slots are padding."""
    live = (slots >= 0).nonzero().flatten()
    block, offset = slots[live] // keys.shape[2], slots[live] % keys.shape[2]
    keys[block, :, offset] = key[live].to(keys.dtype)
    values[block, :, offset] = value[live].to(values.dtype)


def attend(
    query: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    pages: Pages,
) -> None:
    """Write each token's attention to `out`.

    Args:
        query: `[tokens, heads, head size]`; the requests' tokens follow one another.
        out: the result, in the shape of `query`.
        starts: for each request, the index of its first token in `query`; at the end, the number of
            tokens.
        lengths: each request's number of tokens, including those of this step.
        table: each request's block ids.
        pages: the cache.
    """
    counts = starts.diff()
    alone = (counts == 1).nonzero().flatten()
    if alone.numel():
        rows = starts[alone].long()
        out[rows] = _decode(query[rows], lengths[alone].long(), table[alone], pages).to(out.dtype)
    for row in (counts > 1).nonzero().flatten().tolist():
        span = slice(int(starts[row]), int(starts[row + 1]))
        out[span] = _chunk(query[span], int(lengths[row]), table[row], pages).to(out.dtype)


def _decode(query: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, pages: Pages) -> torch.Tensor:
    first = _first_block(lengths - 1, pages)
    blocks = int(((lengths + pages.block_size - 1) // pages.block_size - first).max())
    ids = first[:, None] + torch.arange(blocks)
    chosen = table.gather(1, ids.clamp(max=table.shape[1] - 1).long()).long()
    keys, values = pages.gather(chosen)
    places = first[:, None] * pages.block_size + torch.arange(keys.shape[2])
    last = (lengths - 1)[:, None]
    seen = pages.sees(last, places) & (places <= last)
    values = values.masked_fill(~seen[:, None, :, None], 0)  # unwritten bytes may be NaN
    return _weighted(query[:, None], keys, values, seen[:, None, None, None], pages)[:, 0]


def _chunk(query: torch.Tensor, length: int, table: torch.Tensor, pages: Pages) -> torch.Tensor:
    begin = length - query.shape[0]
    first = int(_first_block(torch.tensor(begin), pages)) if pages.causal else 0
    last = (length + pages.block_size - 1) // pages.block_size
    keys, values = pages.gather(table[None, first:last].long())
    size = length - first * pages.block_size
    places = torch.arange(first * pages.block_size, length)
    seen = pages.sees(torch.arange(begin, length)[:, None], places)
    return _weighted(query[None], keys[:, :, :size], values[:, :, :size], seen, pages)[0]


def _weighted(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, pages: Pages
) -> torch.Tensor:
    """Return the values `[requests, tokens, heads, size]`, weighted by attention. `query` has the same shape."""
    requests, tokens, heads, size = query.shape
    grouped = query.view(requests, tokens, keys.shape[1], -1, size).permute(0, 2, 3, 1, 4).float()
    scores = grouped @ keys.unsqueeze(2).transpose(-1, -2) * pages.scale
    if pages.softcap > 0:
        scores = pages.softcap * torch.tanh(scores / pages.softcap)
    weights = scores.masked_fill(~seen, NEVER).softmax(dim=-1)
    result = weights @ values.unsqueeze(2)
    return result.permute(0, 3, 1, 2, 4).reshape(requests, tokens, heads, size)


def _first_block(place: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Return the index of the first block that the token at `place` attends to."""
    if pages.window <= 0:
        return torch.zeros_like(place)
    return (place - pages.window + 1).clamp(min=0) // pages.block_size


def _laid_out(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.transpose(1, 2).flatten(2, 3).float()
