"""The engine: accepts requests, steps while there is work, and streams tokens to the callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Self

from kvoffload.engine.block_pool import BlockPool
from kvoffload.engine.config import EngineConfig, SamplingParams
from kvoffload.engine.errors import EngineStopped, PoolExhausted, PromptTooLong, RequestRefused
from kvoffload.engine.groups import Capacity, make_groups, pool_size
from kvoffload.engine.plugin import (
    EngineFacts,
    EnginePlugin,
    GroupFacts,
    SchedulerPlugin,
    WorkerPlugin,
)
from kvoffload.engine.request import KeyChain, Request, RequestState, RequestStats, TokenStream
from kvoffload.engine.runner import Runner
from kvoffload.engine.scheduler import Batch, Scheduler
from kvoffload.engine.tables import BlockTables

if TYPE_CHECKING:
    from types import TracebackType

    from kvoffload.engine.request import Token

# Seconds to pause after a step that computed nothing, so that loads and plugin work can end.
_IDLE_STEP_S = 0.0005


class EngineStatistics(NamedTuple):
    """The engine's state in numbers."""

    steps: int  #: steps so far, including empty ones
    waiting: int  #: requests without blocks
    loading: int  #: requests whose blocks a plugin is filling
    running: int
    free_blocks: int  #: blocks without references
    leased_blocks: int  #: blocks that the plugin has leased


class Engine:
    """One engine on one device, driven by the event loop in which it is entered.

    Use it as `async with Engine(config) as engine:`. Leaving the block aborts open requests and waits until loads and
    plugin work have ended. Without a running loop, call `submit`, then `step` while `has_work`, and at the end `close`.

    Args:
        config: the engine's configuration.
        plugin: the plugin, if any; `load_plugin` finds one by its name.
        clock: returns seconds, for statistics; None: the running loop's time.
        make_runner: creates the runner of the model; tests replace it with a cheaper one.

    Raises:
        ConfigError: the device does not exist.
    """

    def __init__(
        self,
        config: EngineConfig,
        plugin: EnginePlugin | None = None,
        clock: Callable[[], float] | None = None,
        make_runner: Callable[[EngineConfig, Sequence[GroupFacts], int], Runner] = Runner,
    ) -> None:
        self.config = config
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        groups = make_groups(config)
        self._capacity = Capacity(groups, config.step_tokens, config.max_model_len)
        self.pool = BlockPool(pool_size(config, self._capacity))
        self.runner = make_runner(config, groups, self.pool.num_blocks)
        self.facts = EngineFacts(config, groups, self.pool)
        self._plugin = SchedulerPlugin()
        self._workers: list[WorkerPlugin] = []
        if plugin is not None:
            self._start(plugin)
        tables = BlockTables(self.pool, groups)
        self._scheduler = Scheduler(tables, self._capacity, self._plugin, config.max_requests)
        self._open: dict[str, tuple[Request, TokenStream]] = {}
        self._numbers = count()
        self._steps = 0
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._is_stopping = False

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        trace_parent: str | None = None,
    ) -> TokenStream:
        """Queue a request and return the stream of its tokens.

        Args:
            prompt: token ids.
            params: how to sample; None: the default number of tokens.
            request_id: unique among open requests; None: the engine chooses one.
            trace_parent: W3C `traceparent` of the caller's span, for plugins that trace.

        Raises:
            RequestRefused: the request can never be served, or its id is in use; the message has the reason.
            EngineStopped: the engine has stopped.
        """
        if self._is_stopping:
            raise EngineStopped("the engine has stopped")
        request_id = request_id or f"request-{next(self._numbers)}"
        if request_id in self._open or request_id in self._scheduler.loading:
            raise RequestRefused(f"a request with the id {request_id!r} is open")
        params = params or SamplingParams()
        self._check_prompt(prompt, params)
        groups = len(self._capacity.groups)
        chain = KeyChain(self.config.block_tokens, groups)
        stats = RequestStats(len(prompt), arrived_s=self._clock())
        request = Request(request_id, list(prompt), len(prompt), params, chain, stats, groups, trace_parent)
        self._capacity.check_fits(request.max_kv_tokens, self.pool.usable_blocks)
        stream = TokenStream(request_id, request.stats, self.abort)
        self._open[request_id] = (request, stream)
        self._scheduler.add(request)
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request early, if it is open."""
        if request_id in self._open:
            self._end(self._open[request_id][0], error=None)

    def preempt(self, request_id: str) -> bool:
        """Preempt a running request: take its blocks, and compute the request again later.

        Return False if the request is not running.
        """
        request, _ = self._open.get(request_id, (None, None))
        if request is None or request.state is not RequestState.RUNNING:
            return False
        self._scheduler.preempt(request)
        return True

    # --- the whole engine -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether another step is needed."""
        return self._scheduler.has_requests or self._plugin.has_pending_work()

    def step(self) -> bool:
        """Run one step; return False if the step had nothing to compute."""
        # Call `has_pending_work` before scheduling: a plugin that returns False here releases no leased blocks in this
        # step.
        plugin_waits = self._plugin.has_pending_work()
        batch = self._scheduler.schedule()
        plan = self._plugin.plan(batch.facts)
        for worker in self._workers:
            worker.start_loads(plan)
        logits = self.runner.launch(batch) if batch.chunks else None
        for worker in self._workers:
            worker.start_stores(plan)
        if logits is not None:
            self._deliver(batch, self.runner.sample(batch, logits))
        is_stuck = batch.is_starved and not (batch.chunks or self._scheduler.loading or plugin_waits)
        self._scheduler.loads_ended(self._plugin.update([worker.take_output() for worker in self._workers]))
        if is_stuck:
            self._fail_starved()
        self._steps += 1
        return bool(batch.chunks)

    def reset_prefix_cache(self) -> bool:
        """Discard all KV on the device and in the plugin. Return False if some KV is in use and was not discarded."""
        device, plugin = self.pool.reset_prefix_cache(), self._plugin.reset()
        self._wake.set()
        return device and plugin

    def audit(self) -> list[str]:
        """Return a message for every broken invariant. Call this between steps."""
        return self._scheduler.audit(self.pool)

    def statistics(self) -> EngineStatistics:
        """Return the engine's state in numbers. This scans the whole pool."""
        scheduler = self._scheduler
        return EngineStatistics(
            self._steps,
            len(scheduler.waiting),
            len(scheduler.loading),
            len(scheduler.running),
            self.pool.free_blocks,
            self.pool.leased_blocks,
        )

    def close(self) -> None:
        """End open requests and shut the plugin down, without waiting. For callers that call `step` themselves."""
        self._refuse_all(EngineStopped("the engine has stopped"))
        self._shut_down()

    async def stop(self) -> None:
        """End open requests, wait until loads and plugin work have ended, and shut the plugin down.

        Raises:
            Exception: the error that ended the engine earlier, if any.
        """
        self._refuse_all(EngineStopped("the engine has stopped"))
        self._wake.set()
        if self._loop_task is not None:
            await self._loop_task

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._run(), name="kv-engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _start(self, plugin: EnginePlugin) -> None:
        self._plugin = plugin.scheduler_side(self.facts)
        try:
            for rank in range(self.config.ranks):
                self._workers.append(plugin.worker_side(self.facts, rank))
                self._workers[rank].register_kv_caches(self.runner.rank_tensors(rank))
        except BaseException:
            self._shut_down()  # Shut down the sides that were already created.
            raise

    def _shut_down(self) -> None:
        for worker in self._workers:
            worker.shutdown()
        self._plugin.shutdown()

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestRefused("the prompt is empty: there is nothing to continue")
        size = self.config.model.vocab_size
        if wrong := next((token for token in prompt if not 0 <= token < size), None):
            raise RequestRefused(f"token {wrong} is not in the vocabulary of {size} tokens")
        if len(prompt) + params.max_new_tokens > self.config.max_model_len:
            raise PromptTooLong(len(prompt), params.max_new_tokens, self.config.max_model_len)

    async def _run(self) -> None:
        try:
            while self.has_work or not self._is_stopping:
                await self._turn()
        except BaseException as error:
            stopped = EngineStopped(f"the engine has stopped: {error!r}")
            stopped.__cause__ = error
            self._refuse_all(stopped)
            raise
        finally:
            self._shut_down()

    async def _turn(self) -> None:
        if not self.has_work:
            self._wake.clear()
            await self._wake.wait()
        else:
            # Yield even after a step with work, so that tasks that wait for the step's tokens can run.
            await asyncio.sleep(0 if self.step() else _IDLE_STEP_S)

    def _deliver(self, batch: Batch, sampled: Sequence[Token]) -> None:
        for request, token in self._scheduler.confirm(batch, sampled):
            stats, stream = request.stats, self._open[request.request_id][1]
            if stats.first_token_s is None:
                stats.first_token_s = self._clock()
            stream.push(token)
            if request.state is RequestState.ENDED:
                self._close_stream(request, error=None)

    def _fail_starved(self) -> None:
        scheduler = self._scheduler
        request = scheduler.running[0] if scheduler.running else scheduler.waiting[0]
        self._end(request, PoolExhausted(self.pool.leased_blocks, self.pool.usable_blocks))

    def _refuse_all(self, error: EngineStopped) -> None:
        self._is_stopping = True
        for request, _ in tuple(self._open.values()):
            self._end(request, error)

    def _end(self, request: Request, error: BaseException | None) -> None:
        self._scheduler.end(request, aborted=True)
        self._close_stream(request, error)
        self._wake.set()

    def _close_stream(self, request: Request, error: BaseException | None) -> None:
        request.stats.finished_s = self._clock()
        self._open.pop(request.request_id)[1].finish(error)
