"""A small plugin that uses every hook: it copies confirmed blocks to a dictionary and back.

The plugin checks that the engine calls the hooks in the promised order. A test decides when the plugin's loads end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload.engine import Engine, Token
from kvoffload.engine.groups import first_needed_block
from kvoffload.engine.plugin import EngineFacts, LoadResults, SchedulerPlugin, WorkerPlugin
from tests.engine.tiny import run, tiny_engine, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvoffload.engine.plugin import BlockTables, StepFacts
    from kvoffload.engine.request import Request

Copies = tuple[tuple[bytes, int], ...]  # pairs of key and device block


@dataclass(frozen=True)
class Plan:
    loads: Copies
    stores: Copies


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


@dataclass
class CopyingWorker(WorkerPlugin):
    host: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    calls: list[str] = field(default_factory=list)

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def start_loads(self, plan: object) -> None:
        assert isinstance(plan, Plan)
        self.calls.append("loads")
        for key, block in plan.loads:
            for tensor, copy in zip(self.tensors, self.host[key], strict=True):
                tensor[block] = copy

    def start_stores(self, plan: object) -> None:
        assert isinstance(plan, Plan)
        self.calls.append("stores")
        for key, block in plan.stores:
            self.host[key] = [tensor[block].clone() for tensor in self.tensors]

    def take_output(self) -> object:
        self.calls.append("output")
        return len(self.host)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class CopyingScheduler(SchedulerPlugin):
    """The plugin's scheduler side. With `hold_loads`, loads stay open. Loads of requests in `fails` fail."""

    def __init__(self, engine: EngineFacts) -> None:
        self.facts = engine
        self.pool = engine.pool
        self.hold_loads = False
        self.fails: set[str] = set()
        self.stored: set[bytes] = set()
        self.outputs: list[Sequence[object]] = []
        self.counts: Counter[str] = Counter()
        self.steps: list[StepFacts] = []
        self.loads: dict[str, Copies] = {}
        self._planned: list[str] = []  # the loads that the next plan starts
        self._failed_once: set[str] = set()
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, list[dict[int, int]]] = {}
        self._leases: list[int] = []  # the blocks leased for the stores in the last plan
        self._left: dict[bytes, int] = {}  # blocks of ended requests, leased until their stores end

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
        for blocks in range((request.num_tokens - 1) // size, 0, -1):
            if self._holds(request, blocks, device_tokens):
                return blocks * size - device_tokens
        return 0

    def allocated(
        self, request: Request, tables: BlockTables, device_tokens: int, external_tokens: int
    ) -> None:
        self.counts["allocated"] += 1
        self._tables[request.request_id] = [{p: b for p, b in enumerate(table) if b} for table in tables]
        if external_tokens:
            size = self.facts.groups[0].block_tokens
            span = range(device_tokens // size, (device_tokens + external_tokens) // size)
            self.loads[request.request_id] = tuple(self._copies(request, span))
            self._planned.append(request.request_id)
            self.pool.touch(block for _, block in self.loads[request.request_id])

    def plan(self, step: StepFacts) -> Plan:
        assert step.step == len(self.steps)
        self.steps.append(step)
        for request_id in step.preempted:
            del self._tables[request_id]
        stores = dict(self._left)
        for progress in step.progress:
            tables = self._tables[progress.request_id]
            for table, new in zip(tables, progress.new_blocks, strict=True):
                for position, block in new:
                    assert position not in table
                    self._forget(block)
                    table[position] = block
            stores |= self._unstored(self._requests[progress.request_id], progress.confirmed_tokens)
        for state in step.states:
            assert state.key == self._requests[state.request_id].keys(state.group)[state.position]
            assert self.pool.key_of(state.block) == state.key
            self._tables[state.request_id][state.group][state.position] = state.block
            stores |= {state.key: state.block} if state.key not in self.stored else {}
        leased = {block for key, block in stores.items() if key not in self._left}
        self.pool.touch(leased)
        self._leases = [*leased, *self._left.values()]
        self._left = {}
        self.stored |= stores.keys()
        planned, self._planned = self._planned, []
        return Plan(tuple(copy for r in planned for copy in self.loads[r]), tuple(stores.items()))

    def request_ended(self, request: Request, aborted: bool) -> None:
        self.counts["aborted" if aborted else "finished"] += 1
        del self._requests[request.request_id]
        if request.request_id in self._tables and request.confirmed_tokens:
            left = self._unstored(request, request.confirmed_tokens)
            left = {key: block for key, block in left.items() if key not in self._left}
            self.pool.touch(left.values())
            self._left |= left
        self._tables.pop(request.request_id, None)

    def update(self, outputs: Sequence[object]) -> LoadResults:
        self.outputs.append(outputs)
        self.pool.free(self._leases)
        self._leases = []
        if self.hold_loads:
            return LoadResults()
        ended = [request_id for request_id in self.loads if request_id not in self._planned]
        for request_id in ended:
            self.pool.free(block for _, block in self.loads.pop(request_id))
        failed = tuple(request_id for request_id in ended if request_id in self.fails)
        self._failed_once.update(failed)
        return LoadResults(tuple(r for r in ended if r not in failed), failed)

    def has_pending_work(self) -> bool:
        return bool(self.loads or self._left)

    def reset(self) -> bool:
        self.stored.clear()
        return True

    def shutdown(self) -> None:
        self.counts["shutdown"] += 1

    @property
    def is_drained(self) -> bool:
        return not (self._requests or self._tables or self.loads or self._leases or self._left)

    def _holds(self, request: Request, blocks: int, device_tokens: int) -> bool:
        """Return whether the host has the blocks of this prefix that the device lacks."""
        size = self.facts.groups[0].block_tokens
        if blocks * size <= device_tokens:
            return False
        for group in self.facts.groups:
            first = max(device_tokens // size, first_needed_block(group, blocks * size))
            if not self.stored.issuperset(request.keys(group.index)[first:blocks]):
                return False
        return True

    def _copies(self, request: Request, span: range) -> list[tuple[bytes, int]]:
        tables = self._tables[request.request_id]
        return [
            (request.keys(group)[position], table[position])
            for group, table in enumerate(tables)
            for position in span
            if position in table
        ]

    def _unstored(self, request: Request, confirmed: int) -> dict[bytes, int]:
        copies = self._copies(request, range(confirmed // self.facts.groups[0].block_tokens))
        return {
            key: block for key, block in copies if key not in self.stored and self.pool.key_of(block) == key
        }

    def _forget(self, block: int) -> None:
        """Remove a block from all tables: it has left its request's window and was allocated again."""
        for tables in self._tables.values():
            for table in tables:
                for position in [p for p, held in table.items() if held == block]:
                    del table[position]


def engine_with_plugin(kind: str = "full", **settings: object) -> tuple[Engine, CopyingPlugin]:
    plugin = CopyingPlugin()
    return tiny_engine(kind, plugin, **settings), plugin


def returning(kind: str = "full", **settings: object) -> tuple[Engine, CopyingScheduler, list[Token]]:
    """Return an engine without cached blocks, its plugin, which has stored 40 tokens, and the answer to these."""
    engine, plugin = engine_with_plugin(kind, **settings)
    first = run(engine, tokens(40))
    assert engine.pool.reset_prefix_cache()
    return engine, plugin.scheduler, first
