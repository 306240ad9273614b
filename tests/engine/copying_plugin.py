"""A small plugin that records its calls. A test decides which prompts it keeps, and when its loads end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvoffload.engine import Engine, Token
from kvoffload.engine.groups import first_needed_block
from kvoffload.engine.plugin import EngineFacts, LoadResults, SchedulerPlugin, WorkerPlugin
from kvoffload.engine.request import KeyChain
from tests.engine.tiny import run, tiny_engine, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvoffload.engine.plugin import BlockTables, StepFacts
    from kvoffload.engine.request import Request

Copies = tuple[tuple[bytes, int], ...]
"""Pairs of key and device block. A step's plan consists of the copies to load."""


class CopyingPlugin:
    def __init__(self) -> None:
        self.scheduler: CopyingScheduler
        self.workers: list[CopyingWorker] = []

    def scheduler_side(self, engine: EngineFacts) -> CopyingScheduler:
        self.scheduler = CopyingScheduler(engine)
        return self.scheduler

    def worker_side(self, engine: EngineFacts, rank: int) -> CopyingWorker:
        assert rank == len(self.workers)
        self.workers.append(CopyingWorker())
        return self.workers[-1]

    def keep(self, prompt: Sequence[int]) -> None:
        """Copy a served prompt's blocks from the device, and empty the device's prefix cache."""
        facts = self.scheduler.facts
        chain = KeyChain(facts.groups[0].block_tokens, len(facts.groups))
        chain.extend(prompt)
        for group in facts.groups:
            for key in chain.keys(group.index):
                if (block := facts.pool.cached_block(key)) is not None:
                    self.scheduler.kept.add(key)
                    for worker in self.workers:
                        worker.host[key] = [tensor[block].clone() for tensor in worker.tensors]
        assert facts.pool.reset_prefix_cache()


class CopyingWorker(WorkerPlugin):
    def __init__(self) -> None:
        self.host: dict[bytes, list[torch.Tensor]] = {}
        self.tensors: Sequence[torch.Tensor] = ()
        self.calls: list[str] = []

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def start_loads(self, plan: object) -> None:
        assert isinstance(plan, tuple)
        self.calls.append("loads")
        for key, block in plan:
            for tensor, copy in zip(self.tensors, self.host[key], strict=True):
                tensor[block] = copy

    def start_stores(self, plan: object) -> None:
        self.calls.append("stores")

    def take_output(self) -> object:
        self.calls.append("output")
        return len(self.host)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class CopyingScheduler(SchedulerPlugin):
    """The plugin's scheduler side. With `hold_loads`, loads stay open. Loads of requests in `fails` fail."""

    def __init__(self, engine: EngineFacts) -> None:
        self.facts = engine
        self.hold_loads = False
        self.fails: set[str] = set()
        self.kept: set[bytes] = set()
        self.outputs: list[Sequence[object]] = []
        self.counts: Counter[str] = Counter()
        self.steps: list[StepFacts] = []
        self.loads: dict[str, Copies] = {}
        self._planned: list[str] = []  # the loads that the next plan starts
        self._failed_once: set[str] = set()
        self._requests: dict[str, Request] = {}

    def request_added(self, request: Request) -> None:
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request

    def lookup(self, request: Request, device_tokens: int) -> int | None:
        self.counts["lookup"] += 1
        assert request is self._requests[request.request_id]
        if request.request_id in self._failed_once:
            return 0
        size = self.facts.groups[0].block_tokens
        # Offer whole blocks and leave the engine at least one token to compute. If the engine took only a
        # part of the offer, a chunk could need other blocks.
        for blocks in range((request.num_tokens - 1) // size, device_tokens // size, -1):
            if self._holds(request, blocks, device_tokens):
                return blocks * size - device_tokens
        return 0

    def allocated(
        self, request: Request, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None:
        self.counts["allocated"] += 1
        if external_tokens:
            size = self.facts.groups[0].block_tokens
            span = slice(device_tokens // size, (device_tokens + external_tokens) // size)
            copies: list[tuple[bytes, int]] = []
            for group, table in enumerate(tables):
                pairs = zip(request.keys(group)[span], table[span], strict=True)
                copies += [(key, block) for key, block in pairs if block]
            self.loads[request.request_id] = tuple(copies)
            self._planned.append(request.request_id)

    def plan(self, step: StepFacts) -> Copies:
        assert step.step == len(self.steps)
        self.steps.append(step)
        for state in step.states:
            assert state.key == self._requests[state.request_id].keys(state.group)[state.position]
            assert state.key == self.facts.pool.key_of(state.block)
        planned, self._planned = self._planned, []
        return tuple(copy for request_id in planned for copy in self.loads[request_id])

    def request_ended(self, request: Request, aborted: bool) -> None:
        self.counts["aborted" if aborted else "finished"] += 1
        del self._requests[request.request_id]

    def update(self, outputs: Sequence[object]) -> LoadResults:
        self.outputs.append(outputs)
        if self.hold_loads:
            return LoadResults()
        ended = [request_id for request_id in self.loads if request_id not in self._planned]
        for request_id in ended:
            del self.loads[request_id]
        failed = tuple(request_id for request_id in ended if request_id in self.fails)
        self._failed_once.update(failed)
        return LoadResults(tuple(r for r in ended if r not in failed), failed)

    def has_pending_work(self) -> bool:
        return bool(self.loads)

    def reset(self) -> bool:
        self.kept.clear()
        return True

    def shutdown(self) -> None:
        self.counts["shutdown"] += 1

    @property
    def is_drained(self) -> bool:
        return not (self._requests or self.loads)

    def _holds(self, request: Request, blocks: int, device_tokens: int) -> bool:
        """Return whether the host has the blocks of this prefix that the device lacks."""
        size = self.facts.groups[0].block_tokens
        for group in self.facts.groups:
            first = max(device_tokens // size, first_needed_block(group, blocks * size))
            if not self.kept.issuperset(request.keys(group.index)[first:blocks]):
                return False
        return True


def engine_with_plugin(kind: str = "full", **settings: object) -> tuple[Engine, CopyingPlugin]:
    plugin = CopyingPlugin()
    return tiny_engine(kind, plugin, **settings), plugin


def returning(kind: str = "full", **settings: object) -> tuple[Engine, CopyingScheduler, list[Token]]:
    """Return an engine without cached blocks, its plugin, which has kept 40 tokens, and the answer to these."""
    engine, plugin = engine_with_plugin(kind, **settings)
    first = run(engine, tokens(40))
    plugin.keep(tokens(40))
    return engine, plugin.scheduler, first
