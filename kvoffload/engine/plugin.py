"""The hooks through which a plugin enters the engine.

One step, in order::

    schedule        lookup / allocated for the requests that are admitted
    plan            exactly once, also when the step has no work
    start_loads     each rank, before the forward pass
    (forward)
    start_stores    each rank, after the forward pass was launched
    take_output     each rank
    (tokens)        request_ended for the requests that finished
    update          with the ranks' outputs

All hooks run on the engine's event loop thread and must not block: while one runs, no token is computed. What a
hook raises ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal, Protocol

from kvoffload.engine.errors import PluginError

if TYPE_CHECKING:
    import torch

    from kvoffload.engine.block_pool import BlockPool

ENTRY_POINT_GROUP = "kvoffload.engine_plugins"

GroupKind = Literal["full", "sliding_window", "chunked_local", "recurrent"]

#: Block ids per group, by position in the request; the null id 0 where the request holds no block.
BlockTables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group: layers with one attention kind that share a block table."""

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None  # sliding window only; counts the attending token itself
    chunk_tokens: int | None  # chunked local only; a multiple of block_tokens


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a plugin may know of the engine; fixed for the engine's life."""

    groups: tuple[GroupFacts, ...]
    num_blocks: int  # of the one pool, the null block (id 0) included
    ranks: int
    step_tokens: int  # token budget of one step; one step is in flight at a time
    device: str  # "cpu", "cuda" or "cuda:N"
    model: str  # equal for models that compute the same
    plugin_config: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Progress:
    """A request that computes in this step.

    `new_blocks` has, per group, the (position, block id) pairs handed out to it in this step. Blocks that
    `allocated` named in the same step are not repeated here.
    """

    request_id: str
    confirmed_tokens: int  # computed for certain before this step's forward pass
    new_blocks: tuple[tuple[tuple[int, int], ...], ...]
    tokens: int  # that this step computes


@dataclass(frozen=True, slots=True)
class StateMade:
    """A recurrent state at the end of a whole block.

    The step's forward pass writes it, and nothing after that: the block keeps it until it is handed out again.
    """

    request_id: str
    group: int
    position: int
    block: int
    key: bytes


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One scheduled step; `progress` holds only the requests that are scheduled in it."""

    step: int  # counts from 0
    progress: tuple[Progress, ...]
    # Lost their blocks since the last plan; none of them was allocated again before this one.
    preempted: tuple[str, ...]
    states: tuple[StateMade, ...] = ()  # of requests in `progress`


@dataclass(frozen=True, slots=True)
class LoadResults:
    """Loads that have ended; each load that was started is named exactly once, also of an aborted request."""

    loaded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class RequestView(Protocol):
    """A request as the scheduler side may see it. Read-only; valid from `request_added` to `request_ended`."""

    @property
    def request_id(self) -> str:
        """Unique among the engine's open requests."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def trace_parent(self) -> str | None:
        """The caller's W3C `traceparent`, not checked; None without one."""

    @property
    def confirmed_tokens(self) -> int:
        """Tokens whose KV is certainly in the request's blocks; 0 while it waits or loads."""

    @property
    def shared_tokens(self) -> int:
        """Tokens whose blocks of full attention the device holds, where it lacks a recurrent state after them."""

    def keys(self, group: int) -> Sequence[bytes]:
        """Keys of all full blocks of the tokens known so far, by position; grows. Not to be altered."""


class SchedulerPlugin(Protocol):
    """The scheduler's side of a plugin; one per engine."""

    def bind(self, pool: BlockPool) -> None:
        """Called once, before the first request. The plugin may lease blocks: `pool.touch`, `pool.free`."""

    def request_added(self, request: RequestView) -> None:
        """A request was accepted. Called once per request, before any other hook that names it."""

    def lookup(self, request: RequestView, device_tokens: int) -> int | None:
        """How many tokens beyond `device_tokens` (whole blocks) can be loaded; None: ask again in a later step.

        Called any number of times before an allocation. The engine may accept fewer, always in whole blocks,
        and always leaves at least one token of the request to compute.
        """

    def prefix_boundary(self, request: RequestView) -> int:
        """After how many tokens a recurrent state of this request is wanted; 0 for nowhere.

        Asked after a lookup, of models with recurrent groups only. The request's prefill ends a step there.
        """

    def allocated(
        self, request: RequestView, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None:
        """The request was admitted with these tables; also called with 0 external tokens.

        With external tokens the tables cover device and external tokens, and the request waits until `update`
        names it. Without, they cover the first chunk too. Window groups hold null ids where the window does
        not reach, recurrent groups but for the states that the request goes on from and writes.
        """

    def plan(self, step: StepFacts) -> object:
        """The step's plan for the workers. Called exactly once per step, also for steps without work."""

    def request_ended(self, request: RequestView, aborted: bool) -> None:
        """Called exactly once per request, before its blocks are freed.

        A load that is open stays open: the engine keeps the request's blocks until `update` has named it.
        """

    def update(self, outputs: Sequence[object]) -> LoadResults:
        """What the workers said, in rank order; called after each step. Returns the loads that have ended."""

    def has_pending_work(self) -> bool:
        """True keeps the engine stepping, with empty steps if need be. Must become False in the end."""

    def reset(self) -> bool:
        """Forget everything computed so far; False if some of it could not be forgotten yet."""

    def shutdown(self) -> None:
        """Called once, after the last step."""


class NoPlugin(SchedulerPlugin):
    """A scheduler side that has nothing and wants nothing, so that the engine never asks whether there is a plugin."""

    def bind(self, pool: BlockPool) -> None: ...

    def request_added(self, request: RequestView) -> None: ...

    def lookup(self, request: RequestView, device_tokens: int) -> int | None:
        return 0

    def prefix_boundary(self, request: RequestView) -> int:
        return 0

    def allocated(
        self, request: RequestView, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None: ...

    def plan(self, step: StepFacts) -> object:
        return None

    def request_ended(self, request: RequestView, aborted: bool) -> None: ...

    def update(self, outputs: Sequence[object]) -> LoadResults:
        return LoadResults()

    def has_pending_work(self) -> bool:
        return False

    def reset(self) -> bool:
        return True

    def shutdown(self) -> None: ...


class WorkerPlugin(Protocol):
    """One rank's side of a plugin."""

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        """This rank's physical tensors, dimension 0 = blocks. Called once, before the first step."""

    def start_loads(self, plan: object) -> None:
        """Called in each step before the forward pass."""

    def start_stores(self, plan: object) -> None:
        """Called in each step after the forward pass was launched."""

    def take_output(self) -> object:
        """This rank's report to its scheduler side. Called once per step, after `start_stores`."""

    def shutdown(self) -> None:
        """Called once, after the last step and before the scheduler side's `shutdown`."""


class EnginePlugin(Protocol):
    """Makes the two sides of a plugin for one engine."""

    def scheduler_side(self, engine: EngineFacts) -> SchedulerPlugin:
        """Called once per engine, before the ranks' sides are made."""

    def worker_side(self, engine: EngineFacts, rank: int) -> WorkerPlugin:
        """Called once per rank, in rank order."""


def load_plugin(name: str) -> EnginePlugin:
    """Find a plugin by its entry point, which names a callable without arguments that returns it.

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


def check_hooks(implementation: object, protocol: type) -> None:
    """Refuse, at start-up, an object that lacks one of a protocol's hooks.

    Raises:
        PluginError: naming all hooks that are missing.
    """
    missing = [hook for hook in _hooks_of(protocol) if not hasattr(implementation, hook)]
    if missing:
        raise PluginError(f"{implementation!r} is no {protocol.__name__}: it lacks {', '.join(missing)}")


def _hooks_of(protocol: type) -> Iterable[str]:
    return (name for name in vars(protocol) if not name.startswith("_"))
