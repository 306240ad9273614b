"""One request: its tokens, its block tables, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvoffload.engine.config import SamplingParams
    from kvoffload.engine.keys import KeyChain
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
    """What one request cost; times are of the engine's clock, in seconds.

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
            self.device_hit_tokens, self.external_tokens = device_tokens, external_tokens


@dataclass(slots=True, eq=False)
class Request:
    """A request as the scheduler keeps it; plugins see it through `RequestView`."""

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
    recycled_blocks: list[int] = field(init=False)  # per group: positions below have been given back
    shared_tokens: int = 0  # of the device's blocks of full attention, where it lacks a recurrent state
    junction: int = 0  # a recurrent state is kept after this many tokens
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
        generated = self.num_tokens - self.num_prompt_tokens
        stopped = generated > 0 and self.tokens[-1] in self.params.stop_tokens
        return stopped or generated >= self.params.max_new_tokens

    def keys(self, group: int) -> Sequence[bytes]:
        """Keys of all full blocks of the tokens known so far."""
        return self.chain.keys(group)

    def block_tables(self) -> BlockTables:
        """The blocks held now, per group and position."""
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
