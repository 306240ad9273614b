"""Decides which tokens each request computes in a step, and which requests get, keep or lose blocks.

    WAITING --admitted, without external tokens--> RUNNING --last token--> ENDED
    WAITING --admitted, with external tokens--> LOADING --loaded--> RUNNING
    LOADING --failed--> WAITING        RUNNING --preempted--> WAITING        any --aborted--> ENDED

Requests cannot deadlock, for these reasons:

* If a running request cannot get blocks, the most recently admitted requests are preempted until it can. If it is
  itself the most recent one, it waits and keeps its blocks. So the oldest request gets every block that no load or
  plugin holds.
* The pool has enough blocks for the oldest request, because requests that need more are refused.
* Loads end (the plugin promises this), and a loaded request then runs as the most recent one, which can be preempted.
* No request is admitted in a step in which a running request lacked blocks, and an admission never takes blocks that
  the oldest request may still need.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.engine.errors import PluginError
from kvoffload.engine.plugin import LoadResults, Progress, SchedulerPlugin, StateMade, StepFacts
from kvoffload.engine.request import Request, RequestState, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvoffload.engine.block_pool import BlockPool
    from kvoffload.engine.groups import Capacity
    from kvoffload.engine.tables import BlockTables, NewBlocks

# The maximum number of requests that a step skips because the plugin answers "ask again". Without this limit, a long
# queue waiting for one load would make every step slow.
_MAX_SKIPPED = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens [start, end) of one request, computed in one step."""

    request: Request
    start: int
    end: int
    new_blocks: NewBlocks

    @property
    def samples(self) -> bool:
        """Return whether the chunk ends with the request's last token, so that a new token is sampled."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    chunks: tuple[Chunk, ...]
    facts: StepFacts
    is_starved: bool  # whether too few blocks were free for a request


class Scheduler:
    """Keeps the requests' states and queues. The scheduler never waits, and uses no clock and no tensors."""

    def __init__(
        self, tables: BlockTables, capacity: Capacity, plugin: SchedulerPlugin, max_requests: int
    ) -> None:
        self._tables = tables
        self._capacity = capacity
        self._plugin = plugin
        self._max_requests = max_requests
        self._has_states = any(group.kind == "recurrent" for group in capacity.groups)
        self._step = 0
        self._starved = False
        self._preempted: list[str] = []  # ids of requests preempted since the last plan
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.loading: dict[str, Request] = {}

    @property
    def has_requests(self) -> bool:
        """Return whether any request waits, loads or runs, or still holds blocks."""
        return bool(self.waiting or self.running or self.loading)

    def add(self, request: Request) -> None:
        """Queue a request that fits in the pool."""
        self._plugin.request_added(request)
        self.waiting.append(request)

    def end(self, request: Request, aborted: bool) -> None:
        """End a request, and release its blocks unless a load may still write to them."""
        self._plugin.request_ended(request, aborted)
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._tables.release(request)
        if request.request_id in self._preempted:
            self._preempted.remove(request.request_id)
        request.state = RequestState.ENDED

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks, and put the request at the head of the queue to be computed again."""
        self.running.remove(request)
        self._tables.release(request)
        request.stats.preemptions += 1
        self._wait_first(request)
        self._preempted.append(request.request_id)

    def schedule(self) -> Batch:
        """Schedule one step, running requests first."""
        self._starved = False
        chunks = self._continue_running(self._capacity.in_flight_tokens)
        budget = self._capacity.in_flight_tokens - sum(chunk.end - chunk.start for chunk in chunks)
        # A preempted request must not get new blocks before the plugin's plan has reported the loss of its old blocks.
        if not self._starved and not self._preempted:
            chunks += self._admit_waiting(budget)
        states = self._states_made(chunks) if self._has_states else ()
        facts = StepFacts(self._step, tuple(map(_progress, chunks)), tuple(self._preempted), states)
        self._preempted.clear()
        self._step += 1
        return Batch(tuple(chunks), facts, self._starved)

    def confirm(self, batch: Batch, sampled: Sequence[Token]) -> list[tuple[Request, Token]]:
        """Apply a step's results, and end complete requests. Return each new token with its request.

        `sampled` has one token for each chunk that samples, in order.
        """
        tokens = iter(sampled)
        emitted = [(chunk.request, next(tokens)) for chunk in batch.chunks if chunk.samples]
        for chunk in batch.chunks:
            self._confirm_tokens(chunk)
        for request, token in emitted:
            self._take_token(request, token)
        return emitted

    def loads_ended(self, results: LoadResults) -> None:
        """Resume the requests whose load succeeded; requeue the requests whose load failed."""
        for request_id in results.loaded:
            self._load_ended(request_id, self._run_loaded)
        for request_id in reversed(results.failed):
            # The request whose load failed first must become the head of the queue.
            self._load_ended(request_id, self._retry)

    def audit(self, pool: BlockPool) -> list[str]:
        """Return a message for every broken invariant. Call this between steps."""
        holders = (*self.running, *self.loading.values())
        held = Counter(block for request in holders for table in request.tables for block in table if block)
        found = pool.audit(held)
        for request in holders:
            found += _table_problems(request, self._capacity)
        for request in self.waiting:
            if request.state is not RequestState.WAITING or any(request.tables):
                found.append(f"request {request.request_id} is {request.state.value}, but holds blocks")
        return found

    # --- recurrent states ------------------------------------------------------------------------------------

    def _chunk_end(self, request: Request, start: int, budget: int) -> int:
        """Return where this step's chunk of the request ends.

        Recurrent state is kept only if the chunk ends on a block boundary. So a prefill stops at the end of its last
        whole block, and at the end of a prefix that other requests share.
        """
        end = min(request.num_tokens, start + budget)
        if not self._has_states:
            return end
        last = request.num_tokens - 1
        ends = (request.prefix_boundary, last - last % self._capacity.block_tokens)
        return min([kept for kept in ends if start < kept < end], default=end)

    def _states_made(self, chunks: Sequence[Chunk]) -> tuple[StateMade, ...]:
        return tuple(
            state for chunk in chunks for state in self._tables.states_made(chunk.request, chunk.end)
        )

    # --- running requests -------------------------------------------------------------------------------------

    def _continue_running(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in tuple(self.running):
            if budget == 0 or request.state is not RequestState.RUNNING:
                break  # When a request was preempted, all requests after it were preempted, too.
            end = self._chunk_end(request, request.confirmed_tokens, budget)
            new_blocks = self._grow(request, end)
            if new_blocks is None:
                self._starved = True
                break
            chunks.append(Chunk(request, request.confirmed_tokens, end, new_blocks))
            budget -= end - request.confirmed_tokens
        return chunks

    def _grow(self, request: Request, end: int) -> NewBlocks | None:
        """Allocate blocks up to `end`. While too few are free, preempt requests that were admitted after this one."""
        while (new_blocks := self._tables.grow(request, end)) is None:
            if self.running[-1] is request:
                return None
            self.preempt(self.running[-1])
        return new_blocks

    def _confirm_tokens(self, chunk: Chunk) -> None:
        request = chunk.request
        request.confirmed_tokens = chunk.end
        request.stats.computed_tokens += chunk.end - chunk.start
        self._tables.index_confirmed(request)

    def _take_token(self, request: Request, token: Token) -> None:
        request.append(token.token_id)
        request.stats.generated_tokens += 1
        if request.is_complete:
            self.end(request, aborted=False)

    # --- waiting requests -------------------------------------------------------------------------------------

    def _admit_waiting(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        skipped: list[Request] = []
        while (
            budget and self.waiting and self._has_room and len(skipped) < _MAX_SKIPPED and not self._starved
        ):
            request = self.waiting.popleft()
            chunk = self._admit(request, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
            elif request.state is RequestState.WAITING:
                skipped.append(request)
        self.waiting.extendleft(reversed(skipped))
        return chunks

    @property
    def _has_room(self) -> bool:
        return len(self.running) + len(self.loading) < self._max_requests

    def _admit(self, request: Request, budget: int) -> Chunk | None:
        """Return the chunk to compute; None if the request loads, or waits for the plugin or for blocks."""
        hit = self._tables.find_prefix(request)
        device = hit.blocks * self._capacity.block_tokens
        request.shared_tokens = hit.full_blocks * self._capacity.block_tokens
        external = self._lookup(request, device)
        if external is None:
            return None
        seen = device + external
        end = seen if external else self._chunk_end(request, device, budget)
        if not self._tables.admit(request, hit, seen, end, self._reserve()):
            self._starved = True
            return None
        self._plugin.allocated(request, tuple(map(tuple, request.tables)), device, external)
        if external:
            self._load(request, device, external)
            return None
        self._run(request, device, 0)
        return Chunk(request, device, end, new_blocks=((),) * request.groups)

    def _lookup(self, request: Request, device_tokens: int) -> int | None:
        """Return the plugin's answer to `lookup`, cut to whole blocks that leave at least one token to compute."""
        answer = self._plugin.lookup(request, device_tokens)
        if answer is None:
            return None
        if self._has_states:
            request.prefix_boundary = max(request.shared_tokens, self._plugin.prefix_boundary(request))
        most = min(answer, request.num_tokens - 1 - device_tokens)
        return most - most % self._capacity.block_tokens

    def _reserve(self) -> int:
        """Return how many blocks an admission must leave free for the oldest running request."""
        if not self.running:
            return 0
        oldest = self.running[0]
        return max(0, self._capacity.request_blocks(oldest.max_kv_tokens) - oldest.held_blocks)

    def _load(self, request: Request, device_tokens: int, external_tokens: int) -> None:
        request.state = RequestState.LOADING
        request.load_device_tokens = device_tokens
        request.load_external_tokens = external_tokens
        self.loading[request.request_id] = request

    def _run(self, request: Request, device_tokens: int, external_tokens: int) -> None:
        request.state = RequestState.RUNNING
        request.confirmed_tokens = device_tokens + external_tokens
        request.stats.count_reused(device_tokens, external_tokens)
        self.running.append(request)

    def _wait_first(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self.waiting.appendleft(request)

    # --- loads ------------------------------------------------------------------------------------------------

    def _load_ended(self, request_id: str, proceed: Callable[[Request], None]) -> None:
        request = self.loading.pop(request_id, None)
        if request is None:
            raise PluginError(
                f"the plugin reported the end of a load of request {request_id!r} that is not open"
            )
        if request.state is RequestState.ENDED:
            self._tables.release(request)
        else:
            proceed(request)

    def _run_loaded(self, request: Request) -> None:
        self._run(request, request.load_device_tokens, request.load_external_tokens)
        self._tables.index_confirmed(request)

    def _retry(self, request: Request) -> None:
        self._tables.release(request)
        self._wait_first(request)


def _progress(chunk: Chunk) -> Progress:
    return Progress(chunk.request.request_id, chunk.start, chunk.new_blocks, chunk.end - chunk.start)


def _table_problems(request: Request, capacity: Capacity) -> list[str]:
    counts = [sum(1 for block in table if block) for table in request.tables]
    found = [
        f"request {request.request_id} holds {count} blocks in group {group.index}, over its bound"
        for group, count in zip(capacity.groups, counts, strict=True)
        if count > capacity.group_blocks(group, request.max_kv_tokens)
    ]
    if sum(counts) != request.held_blocks:
        found.append(f"request {request.request_id} holds {sum(counts)} blocks, counts {request.held_blocks}")
    return found
