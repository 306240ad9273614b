"""The hooks through which the engine calls a plugin.

One step, in order::

    schedule        lookup / allocated for the requests that are admitted
    plan            exactly once, even if the step has no work
    start_loads     each rank, before the forward pass
    (forward)
    start_stores    each rank, after the forward pass was launched
    take_output     each rank
    (tokens)        request_ended for the requests that finished
    update          with the ranks' outputs

All hooks run on the engine's event loop thread and must not block: while a hook runs, no token is computed. An
exception in a hook ends the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from kvoffload.engine.errors import PluginError

if TYPE_CHECKING:
    import torch

    from kvoffload.engine.block_pool import BlockPool
    from kvoffload.engine.config import EngineConfig, GroupKind
    from kvoffload.engine.request import Request

ENTRY_POINT_GROUP = "kvoffload.engine_plugins"

#: For each group, the block id at each position of the request; the null id 0 where the request holds no block.
BlockTables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group: layers of the same attention kind, which share a block table."""

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None  # for sliding windows only; includes the attending token itself
    chunk_tokens: int | None  # for chunked-local attention only; a multiple of block_tokens


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's configuration, groups and block pool, as its plugin gets them."""

    config: EngineConfig
    groups: tuple[GroupFacts, ...]
    pool: BlockPool  # blocks of all groups; a plugin may lease them with `pool.touch` until `pool.free`


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a request that computes in this step.

    `new_blocks` has, per group, the (position, block id) pairs allocated to it in this step. Blocks that were passed to
    `allocated` in the same step are not repeated here.
    """

    request_id: str
    confirmed_tokens: int  # tokens known to have been computed before this step's forward pass
    new_blocks: tuple[tuple[tuple[int, int], ...], ...]
    tokens: int  # the number of tokens that this step computes


@dataclass(frozen=True, slots=True)
class StateMade:
    """A recurrent state at the end of a whole block.

    Only the step's forward pass writes the state. The state stays in the block until the block is allocated again.
    """

    request_id: str
    group: int
    position: int
    block: int
    key: bytes


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One scheduled step, with the progress of the requests that are scheduled in it."""

    step: int  # counts from 0
    progress: tuple[Progress, ...]
    # Requests that lost their blocks since the last plan. None of them has got new blocks yet.
    preempted: tuple[str, ...]
    # the recurrent states of requests in `progress` that the step completes
    states: tuple[StateMade, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadResults:
    """The requests whose loads have ended. Each started load is reported exactly once, even for an aborted request."""

    loaded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class SchedulerPlugin:
    """The scheduler's side of a plugin, one per engine. A hook that is not overridden does nothing.

    Between `request_added` and `request_ended` a plugin may read, but not change, these attributes of a request:

    * `request_id`, `num_tokens` and `num_prompt_tokens`;
    * `keys(group)`: the keys of all full blocks;
    * `confirmed_tokens`: the number of tokens whose KV is known to be in the request's blocks;
    * `shared_tokens`: the number of tokens that full-attention blocks on the device cover, even if the device has no
      recurrent state after them;
    * `trace_parent`: the caller's W3C `traceparent`, unchecked, or None.
    """

    def request_added(self, request: Request) -> None:
        """Handle a new request. Called once per request, before any other hook for this request."""

    def lookup(self, request: Request, device_tokens: int) -> int | None:
        """Return how many tokens after the first `device_tokens` can be loaded; None to be called again later.

        Called any number of times before an allocation. `device_tokens` is a number of whole blocks. The engine may
        accept fewer tokens, always in whole blocks, and always leaves at least one token of the request to compute.
        """
        return 0

    def prefix_boundary(self, request: Request) -> int:
        """Return the number of this request's tokens after which to keep a recurrent state; 0 to keep none.

        Called after a lookup, only for models with recurrent groups. A step of the request's prefill ends at this
        token.
        """
        return 0

    def allocated(
        self, request: Request, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None:
        """Handle the admission of a request with these tables. Called even if there are no external tokens.

        With external tokens, the tables cover device and external tokens, and the request waits until `update` reports
        its load. Without external tokens, the tables also cover the first chunk. Tables of window groups have null ids
        before the window. Tables of recurrent groups have null ids except for the state from which the request
        continues and the state that it writes.
        """

    def plan(self, step: StepFacts) -> object:
        """Return the step's plan for the workers. Called exactly once per step, even if the step has no work."""

    def request_ended(self, request: Request, aborted: bool) -> None:
        """Handle the end of a request. Called exactly once per request, before its blocks are released.

        The engine keeps the blocks of an open load until `update` has reported the load.
        """

    def update(self, outputs: Sequence[object]) -> LoadResults:
        """Process the workers' outputs, in rank order, after each step. Return the loads that have ended."""
        return LoadResults()

    def has_pending_work(self) -> bool:
        """Return True to keep the engine stepping, with empty steps if necessary.

        The plugin must return False eventually.
        """
        return False

    def reset(self) -> bool:
        """Discard everything computed so far. Return False if some KV cannot be discarded yet."""
        return True

    def shutdown(self) -> None:
        """Stop the plugin. Called once, after the last step."""


class WorkerPlugin:
    """One rank's side of a plugin. A hook that is not overridden does nothing."""

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register this rank's physical tensors, whose first dimension is the block.

        Called once, before the first step.
        """

    def start_loads(self, plan: object) -> None:
        """Start the plan's loads. Called in each step, before the forward pass."""

    def start_stores(self, plan: object) -> None:
        """Start the plan's stores. Called in each step, after the forward pass was launched."""

    def take_output(self) -> object:
        """Return this rank's report to its scheduler side. Called once per step, after `start_stores`."""

    def shutdown(self) -> None:
        """Stop this rank's side. Called once, after the last step and before the scheduler side's `shutdown`."""


class EnginePlugin(Protocol):
    """Creates the two sides of a plugin for one engine."""

    def scheduler_side(self, engine: EngineFacts) -> SchedulerPlugin:
        """Return the scheduler's side. Called once per engine, before any `worker_side`."""

    def worker_side(self, engine: EngineFacts, rank: int) -> WorkerPlugin:
        """Return a rank's side. Called once per rank, in rank order."""


def load_plugin(name: str) -> EnginePlugin:
    """Return the plugin that the entry point `name` creates. The entry point is a function without arguments.

    Raises:
        PluginError: no installed distribution offers `name`.
    """
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        offered = ", ".join(sorted(found)) or "none"
        raise PluginError(
            f"no engine plugin is called {name!r}; installed in {ENTRY_POINT_GROUP!r}: {offered}"
        )
    plugin: EnginePlugin = found[name].load()()
    return plugin
