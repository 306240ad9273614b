"""One request: its tokens and their keys, its block tables, its statistics, and the stream that its caller reads."""

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


class RequestState(Enum):
    """The states of a request. Only a request in LOADING, RUNNING or ENDED can hold blocks."""

    WAITING = "waiting"  # the request is new or preempted, or its load failed; nothing is computed
    # A plugin fills the request's blocks. The request is not scheduled, and the loaded blocks are not indexed yet.
    LOADING = "loading"
    RUNNING = "running"
    # Finished or aborted. A request that was aborted while LOADING keeps its blocks until the load has ended.
    ENDED = "ended"


class Token(NamedTuple):
    token_id: int
    logprob: float  # natural logarithm


@dataclass(slots=True)
class RequestStats:
    """The statistics of one request. Times are in seconds of the engine's clock.

    Without preemption, prompt + generated - 1 = device hits + external + computed tokens.
    """

    prompt_tokens: int
    arrived_s: float
    device_hit_tokens: int = 0  # found on the device at the last admission before the first token
    external_tokens: int = 0  # loaded by the plugin at the last admission before the first token
    # found or loaded at admissions after the first token, each of which follows a preemption
    resumed_tokens: int = 0
    computed_tokens: int = 0  # tokens computed again after a preemption are counted again
    generated_tokens: int = 0
    preemptions: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None

    def count_reused(self, device_tokens: int, external_tokens: int) -> None:
        """Count the tokens that a newly admitted request does not have to compute."""
        if self.generated_tokens:
            self.resumed_tokens += device_tokens + external_tokens
        else:
            self.device_hit_tokens = device_tokens
            self.external_tokens = external_tokens


class KeyChain:
    """The keys of one request's full blocks, extended as tokens are added. Equal keys mean equal prefixes.

    A block's hash covers its tokens and the hash of the block before it. The block's key is that hash followed by the
    group's number in four big-endian bytes.
    """

    def __init__(self, block_tokens: int, groups: int) -> None:
        self._block_tokens = block_tokens
        self._last_hash = sha256(b"kv-block-chain:").digest()
        self._keys: tuple[list[bytes], ...] = tuple([] for _ in range(groups))

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the blocks that have become full. `tokens` are all of the request's tokens."""
        size = self._block_tokens
        for start in range(len(self._keys[0]) * size, len(tokens) - size + 1, size):
            self._append(tokens[start : start + size])

    def keys(self, group: int) -> Sequence[bytes]:
        """Return the keys of the full blocks hashed so far, by position."""
        return self._keys[group]

    def _append(self, block: Sequence[int]) -> None:
        # Use eight bytes per token, an array's widest type, so that different blocks never have the same bytes.
        self._last_hash = sha256(self._last_hash + array("q", block).tobytes()).digest()
        for group, keys in enumerate(self._keys):
            keys.append(self._last_hash + group.to_bytes(4, "big"))


@dataclass(slots=True, eq=False)
class Request:
    """A request in the scheduler. Plugins only read it."""

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
    load_device_tokens: int = 0  # while LOADING: the number of tokens found on the device
    load_external_tokens: int = 0  # while LOADING: the number of tokens that the plugin loads
    tables: list[list[int]] = field(init=False)
    # Per group, the position before which all blocks have been released.
    recycled_blocks: list[int] = field(init=False)
    # How many tokens the device's full-attention blocks cover, even without a recurrent state after them.
    shared_tokens: int = 0
    prefix_boundary: int = 0  # a recurrent state is kept after this many tokens
    indexed_blocks: int = 0  # the position before which all blocks can be found by key
    held_blocks: int = 0

    def __post_init__(self) -> None:
        self.forget_blocks()
        self.chain.extend(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and generated tokens so far."""
        return len(self.tokens)

    @property
    def max_kv_tokens(self) -> int:
        """Return the maximum number of tokens whose KV this request can need.

        The last new token's KV is never computed.
        """
        return self.num_prompt_tokens + self.params.max_new_tokens - 1

    @property
    def is_complete(self) -> bool:
        """Return whether all requested tokens have been generated."""
        return self.num_tokens - self.num_prompt_tokens >= self.params.max_new_tokens

    def keys(self, group: int) -> Sequence[bytes]:
        """Return the keys of all full blocks so far, by position."""
        return self.chain.keys(group)

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.chain.extend(self.tokens)

    def forget_blocks(self) -> None:
        """Reset the tables. The caller has released the blocks."""
        self.tables = [[] for _ in range(self.groups)]
        self.recycled_blocks = [0] * self.groups
        self.confirmed_tokens = self.indexed_blocks = self.held_blocks = 0


class TokenStream:
    """Streams the tokens of one request as they are computed.

    Iterate with `async for`. The request is aborted by `aclose`, by leaving an `async with` block over the stream, or
    by cancelling a task that waits for the next token. Unread tokens are then lost.
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
        """Add a new token. Only the engine calls this."""
        self._arrived.put_nowait(token)

    def finish(self, error: BaseException | None = None) -> None:
        """End the stream, with `error` if the request failed. Only the engine calls this."""
        self._arrived.put_nowait(error or StopAsyncIteration())
