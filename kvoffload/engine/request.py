"""One request: its tokens and their keys, its block tables, what became of it, and the stream that its caller reads."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from kvoffload.engine.config import SamplingParams
    from kvoffload.engine.plugin import BlockTables


class RequestState(Enum):
    """Where a request is. Only LOADING and RUNNING hold blocks."""

    WAITING = "waiting"  # new, preempted, or its load failed; nothing is computed
    LOADING = "loading"  # a plugin fills its blocks; not scheduled, its loaded blocks cannot be found yet
    RUNNING = "running"
    ENDED = (
        "ended"  # finished or aborted; one aborted while LOADING keeps its blocks until the load has ended
    )


class Token(NamedTuple):
    """One generated token."""

    token_id: int
    logprob: float  # natural logarithm


@dataclass(slots=True)
class RequestStats:
    """What one request cost. Times are in seconds of the engine's clock.

    Without preemption, prompt + generated - 1 = device hits + external + computed tokens.
    """

    prompt_tokens: int
    arrived_s: float
    device_hit_tokens: int = 0  # found on the device, in the life that led to the first token
    external_tokens: int = 0  # loaded by the plugin, in the same life
    resumed_tokens: int = 0  # found or loaded after preemptions that came later than the first token
    computed_tokens: int = 0  # over all lives; those computed again after a preemption count again
    generated_tokens: int = 0
    preemptions: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None

    def count_reused(self, device_tokens: int, external_tokens: int) -> None:
        """Count the tokens that an admission found, instead of computing them."""
        if self.generated_tokens:
            self.resumed_tokens += device_tokens + external_tokens
        else:
            self.device_hit_tokens = device_tokens
            self.external_tokens = external_tokens


class KeyChain:
    """The keys of one request's full blocks; grows with its tokens. Equal keys mean equal prefixes.

    A block's hash covers its tokens and the hash of the block before it. Its key is that hash followed by the group's number in four big-endian bytes.
    """

    def __init__(self, block_tokens: int, groups: int) -> None:
        self._block_tokens = block_tokens
        self._last_hash = sha256(b"kv-block-chain:").digest()
        self._keys: tuple[list[bytes], ...] = tuple([] for _ in range(groups))

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the blocks of `tokens` (all of the request's tokens) that have become full."""
        size = self._block_tokens
        for start in range(len(self._keys[0]) * size, len(tokens) - size + 1, size):
            self._append(tokens[start : start + size])

    def keys(self, group: int) -> Sequence[bytes]:
        """Return the keys of the full blocks hashed so far, by position."""
        return self._keys[group]

    def _append(self, block: Sequence[int]) -> None:
        # Eight bytes a token: the widest an array takes, so two different blocks never have the same bytes.
        self._last_hash = sha256(self._last_hash + array("q", block).tobytes()).digest()
        for group, keys in enumerate(self._keys):
            keys.append(self._last_hash + group.to_bytes(4, "big"))


@dataclass(slots=True, eq=False)
class Request:
    """A request as the scheduler keeps it; plugins only read it."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    chain: KeyChain
    stats: RequestStats
    groups: int
    trace_parent: str | None = None
    state: RequestState = RequestState.WAITING
    confirmed_tokens: int = 0
    load_device_tokens: int = 0  # while LOADING: tokens that were found on the device ...
    load_external_tokens: int = 0  # ... and those that the plugin brings
    tables: list[list[int]] = field(init=False)
    recycled_blocks: list[int] = field(init=False)  # per group: positions below have been released
    shared_tokens: int = 0  # of the device's blocks of full attention, where it lacks a recurrent state
    prefix_boundary: int = 0  # a recurrent state is kept after this many tokens
    indexed_blocks: int = 0  # positions below can be found by key
    held_blocks: int = 0

    def __post_init__(self) -> None:
        self.forget_blocks()
        self.chain.extend(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""
        return len(self.tokens)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV the request can come to need; the last new token is returned but never computed on."""
        return self.num_prompt_tokens + self.params.max_new_tokens - 1

    @property
    def is_complete(self) -> bool:
        """Whether the last token was the last one asked for."""
        return self.num_tokens - self.num_prompt_tokens >= self.params.max_new_tokens

    def keys(self, group: int) -> Sequence[bytes]:
        """Return the keys of all full blocks of the tokens known so far."""
        return self.chain.keys(group)

    def block_tables(self) -> BlockTables:
        """Return the blocks held now, per group and position."""
        return tuple(map(tuple, self.tables))

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)
        self.chain.extend(self.tokens)

    def forget_blocks(self) -> None:
        """Start again with empty tables; the caller has released the blocks."""
        self.tables = [[] for _ in range(self.groups)]
        self.recycled_blocks = [0] * self.groups
        self.confirmed_tokens = self.indexed_blocks = self.held_blocks = 0


class TokenStream:
    """Tokens of one request as they are computed.

    Iterate with `async for`. The request is aborted by `aclose`, by leaving an `async with` block over the stream, or
    by cancelling a task that waits for the next token. Tokens that arrived before are then gone.
    """

    def __init__(self, request_id: str, stats: RequestStats, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.stats = stats
        self._abort = abort
        self._arrived: asyncio.Queue[Token | BaseException] = asyncio.Queue()
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Return the next token.

        Raises:
            StopAsyncIteration: the request is complete or aborted.
            EngineError: the engine could not serve the request to its end.
        """
        if self._is_closed:
            raise StopAsyncIteration
        try:
            item = await self._arrived.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, BaseException):
            self._is_closed = True
            raise item
        return item

    async def aclose(self) -> None:
        """Abort the request if it is still open."""
        self._is_closed = True
        self._abort(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def push(self, token: Token) -> None:
        """Add a new token; the engine calls it."""
        self._arrived.put_nowait(token)

    def finish(self, error: BaseException | None = None) -> None:
        """End the stream, with an error if the request failed; the engine calls it."""
        self._arrived.put_nowait(error or StopAsyncIteration())
