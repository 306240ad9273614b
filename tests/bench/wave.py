"""Plays waves of requests on the real `VllmScheduler`. Stand-ins replace vLLM's pool, requests and step outputs.

`tests/bench/instructions.py` runs this file as a script below callgrind, with the packages of another checkout, too. So
the file uses only what many versions of kvoffload have.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

BLOCK_TOKENS = 32
SLOTS = 100_000
_DEVICE_BLOCKS = 200_000
_WINDOW = 128
_PREFIXES, _PREFIX_BLOCKS, _PROMPT_TOKENS = 8, 5, 200
_ADMITTED = 5  # requests that the engine admits in a step
_LOAD_STEPS = 3  # steps from a load's allocation to the request's first step


def stand_in_for_vllm() -> None:
    """Add the few classes of vLLM that the scheduler's side inherits from, so that vLLM is not imported."""
    place, classes = "vllm.distributed.kv_transfer.kv_connector.v1", dict[str, dict[str, type]]()
    classes["base"] = {
        name: type(name, (), {}) for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata")
    }
    stats = type("KVConnectorStats", (), {"__init__": lambda self, data: setattr(self, "data", data)})
    classes["metrics"] = {
        "KVConnectorPromMetrics": type("KVConnectorPromMetrics", (), {}),
        "KVConnectorStats": stats,
    }
    for parent in itertools.accumulate(place.split("."), "{}.{}".format):
        sys.modules[parent] = ModuleType(parent)
    for name, members in classes.items():
        sys.modules[f"{place}.{name}"] = module = ModuleType(name)
        module.__dict__.update(members)


class Pool:
    """vLLM's block pool, without memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [SimpleNamespace(block_id=block, block_hash=None, ref_cnt=0) for block in range(blocks)]
        self._free = deque(range(1, blocks))

    def take(self, count: int) -> list[int]:
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self.blocks[block].block_hash, self.blocks[block].ref_cnt = None, 1
        return taken

    def touch(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free.append(block.block_id)

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> None:
        return None


class Hooks:
    """Calls hooks and counts the calls by kind.

    Args:
        by_kind: the module `hook_kinds`, whose functions callgrind knows by name; None to call the hooks directly.
    """

    def __init__(self, by_kind: ModuleType | None = None) -> None:
        self.calls = Counter[str]()
        self._by_kind = by_kind

    def __call__(self, kind: str, hook: Callable[..., Any], *arguments: object) -> Any:
        self.calls[kind] += 1
        return hook(*arguments) if self._by_kind is None else getattr(self._by_kind, kind)(hook, *arguments)


class Engine:
    """An engine whose first group is full attention, and whose other groups have windows."""

    def __init__(self, groups: int, hooks: Hooks, slots: int = SLOTS) -> None:
        from kvoffload.model.engine import EngineShape
        from kvoffload.model.groups import AttentionKind, GroupSpec
        from kvoffload.model.ids import GroupId, Rank
        from kvoffload.model.wire import TransferReport
        from kvoffload.runtime.scheduler_side import SchedulerSide
        from kvoffload.telemetry.payload import Changes
        from kvoffload_vllm.groups import VllmGroups
        from kvoffload_vllm.pool_device import VllmDevice, group_suffix
        from kvoffload_vllm.scheduler import VllmScheduler
        from tests.settings import make_config

        full = GroupSpec(GroupId(0), AttentionKind.FULL, BLOCK_TOKENS)
        windowed = AttentionKind.SLIDING_WINDOW
        windows = [GroupSpec(GroupId(number), windowed, BLOCK_TOKENS, _WINDOW) for number in range(1, groups)]
        shape = EngineShape((full, *windows), ranks=1, device_blocks=_DEVICE_BLOCKS - 1, step_tokens=1024)
        self.pool, device = Pool(_DEVICE_BLOCKS), VllmDevice()
        device.bind(self.pool)
        self.side = SchedulerSide(shape, make_config(), device)
        self.side.reported([TransferReport(Rank(0), (), slots)])
        of_vllm = VllmGroups(shape, tuple(range(groups)), BLOCK_TOKENS)
        self.scheduler = VllmScheduler(self.side, device, of_vllm, Changes(self.side), lambda: None, 16)
        self.hooks = hooks
        self.stored = self.loaded = 0
        self._suffixes = [group_suffix(number) for number in range(groups)]
        self._draw = random.Random(1)
        self._copied: list[Any] = []

    def hashes(self, count: int) -> list[bytes]:
        return [self._draw.randbytes(32) for _ in range(count)]

    def add(self, name: str, hashes: list[bytes], tokens: int) -> SimpleNamespace:
        """Add a request."""
        request = SimpleNamespace(
            request_id=name,
            block_hashes=hashes,
            num_tokens=tokens,
            num_computed_tokens=0,
            num_output_tokens=0,
            num_output_placeholders=0,
            skip_reading_prefix_cache=False,
            kv_transfer_params=None,
            session_id=None,
            table=[],
            steps_to_wait=0,
        )
        self.hooks("seen", self.scheduler.on_new_request, request)
        return request

    def admit(self, request: SimpleNamespace, device_tokens: int) -> None:
        """Look up a request and allocate its blocks."""
        found, _ = self.hooks("lookup", self.scheduler.get_num_new_matched_tokens, request, device_tokens)
        count = -(-request.num_tokens // BLOCK_TOKENS)
        request.table = [self.pool.take(count) for _ in self._suffixes]
        self._name_blocks(request, 0)
        kind, blocks = "load_allocated" if found else "allocated", request.table
        allocated = SimpleNamespace(get_block_ids=lambda: tuple(blocks))
        self.hooks(kind, self.scheduler.update_state_after_alloc, request, allocated, found)
        request.num_computed_tokens = device_tokens + found
        request.steps_to_wait = _LOAD_STEPS if found else 0

    def step(self, kind: str, scheduled: Sequence[tuple[Any, int]], new: Sequence[Any] = ()) -> None:
        """Run a step. The copies of the step before end in it."""
        known = [(request, tokens) for request, tokens in scheduled if request not in new]
        output = SimpleNamespace(
            preempted_req_ids=None,
            kv_cache_block_copies=None,
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
            total_num_scheduled_tokens=sum(tokens for _, tokens in scheduled),
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=frozenset(),
                req_ids=[request.request_id for request, _ in known],
                new_block_ids=[self._grow(request, tokens) for request, tokens in known],
            ),
        )
        plan = self.hooks(kind, self.scheduler.build_connector_meta, output).plan
        for request, tokens in scheduled:
            self._compute(request, tokens)
        self._report(plan)
        self.hooks("stats", self.scheduler.get_kv_connector_stats)
        self.hooks("events", self.scheduler.take_events)
        self.hooks("has_work", self.scheduler.has_pending_push_work)

    def end(self, request: SimpleNamespace) -> None:
        self.hooks("ended", self.scheduler.request_finished_all_groups, request, tuple(request.table))
        self.pool.free_blocks([self.pool.blocks[block] for row in request.table for block in row])

    def _grow(self, request: SimpleNamespace, tokens: int) -> tuple[list[int], ...] | None:
        wanted = -(-(request.num_computed_tokens + tokens) // BLOCK_TOKENS) - len(request.table[0])
        if wanted <= 0:
            return None
        more = tuple(self.pool.take(wanted) for _ in request.table)
        for row, blocks in zip(request.table, more, strict=True):
            row += blocks
        return more

    def _compute(self, request: SimpleNamespace, tokens: int) -> None:
        request.num_computed_tokens += tokens
        if request.num_computed_tokens < request.num_tokens:
            return
        request.num_tokens += 1
        request.num_output_tokens += 1
        known = len(request.block_hashes)
        if (request.num_tokens - 1) // BLOCK_TOKENS > known:
            request.block_hashes += self.hashes(1)
            self._name_blocks(request, known)

    def _name_blocks(self, request: SimpleNamespace, first: int) -> None:
        for row, suffix in zip(request.table, self._suffixes, strict=True):
            for block, block_hash in zip(row[first:], request.block_hashes[first:], strict=False):
                self.pool.blocks[block].block_hash = block_hash + suffix

    def _report(self, plan: Any) -> None:
        from kvoffload.model.causes import CopyOutcome
        from kvoffload.model.ids import Rank
        from kvoffload.model.wire import JobReport, TransferReport
        from kvoffload_vllm.metadata import KVOffloadWorkerMetadata

        ended, self._copied = self._copied, [*plan.loads, *plan.stores]
        self.stored += sum(len(job.slots) for job in plan.stores)
        self.loaded += sum(len(job.slots) for job in plan.loads)
        jobs = [
            JobReport(
                job=job.id,
                direction=job.direction,
                outcome=CopyOutcome.DONE,
                copied_bytes=4096 * len(job.slots),
                queue_s=0.001,
                copy_s=0.001,
            )
            for job in ended
        ]
        report = KVOffloadWorkerMetadata((TransferReport(Rank(0), tuple(jobs), SLOTS),)) if jobs else None
        output = SimpleNamespace(kv_connector_worker_meta=report)
        self.hooks("report" if jobs else "no_report", self.scheduler.update_connector_output, output)


def play(engine: Engine, wave: str, running: int, tokens: int, *, hits: bool) -> None:
    """Play a wave of requests with 8 shared prefixes to the end.

    Args:
        engine: the engine.
        wave: the wave's name. The prefixes of all waves are the same.
        running: the number of requests.
        tokens: the number of tokens that each request generates.
        hits: whether the host has the prefixes. Otherwise the device has them.
    """
    prefixes = random.Random(0)
    shared = [[prefixes.randbytes(32) for _ in range(_PREFIX_BLOCKS)] for _ in range(_PREFIXES)]
    own = _PROMPT_TOKENS // BLOCK_TOKENS - _PREFIX_BLOCKS
    names = (f"{wave} {number}" for number in range(running))
    waiting = deque(
        engine.add(name, [*shared[number % _PREFIXES], *engine.hashes(own)], _PROMPT_TOKENS)
        for number, name in enumerate(names)
    )
    decoding, loading = list[Any](), list[Any]()
    while waiting or loading or decoding:
        admitted = [waiting.popleft() for _ in range(min(_ADMITTED, len(waiting)))]
        for request in admitted:
            engine.admit(request, 0 if hits else _PREFIX_BLOCKS * BLOCK_TOKENS)
        loading += admitted
        new = [request for request in loading if not request.steps_to_wait]
        loading = [request for request in loading if request.steps_to_wait]
        for request in loading:
            request.steps_to_wait -= 1
        prefill = [(request, request.num_tokens - request.num_computed_tokens) for request in new]
        kind = "admitting_step" if admitted or new else "decoding_step"
        engine.step(kind, [*((request, 1) for request in decoding), *prefill], new)
        decoding += new
        for request in [request for request in decoding if request.num_output_tokens >= tokens]:
            engine.end(request)
            decoding.remove(request)
    for _ in range(3):
        engine.step("empty_step", ())


def main(groups: str, running: str, tokens: str, hits: str) -> None:
    """Play a warm-up, then three waves whose instructions callgrind counts. Print the calls of their hooks as JSON."""
    stand_in_for_vllm()
    by_kind = importlib.import_module("hook_kinds")
    engine = Engine(int(groups), Hooks())
    play(engine, "warm-up", int(running), 33, hits=False)
    engine.hooks = Hooks(by_kind)
    by_kind.start()
    for number in range(3):
        play(engine, f"wave {number}", int(running), int(tokens), hits=hits == "hits")
    by_kind.stop()
    print(json.dumps(engine.hooks.calls))


if __name__ == "__main__":
    main(*sys.argv[1:])
