"""Counts how many prompt tokens each store policy finds, on hosts of several sizes, with the real core.

Sizes are multiples of the live set: the blocks that have been used and will be used again, on average. The device keeps
its blocks until it needs them, as engines do. A request computes its prompt in steps, and its blocks stay in use until
seven more requests have arrived. Copies end at once and copy nothing, so that equal options give equal numbers.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kvoffload.checks.options import positive
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.engine.block_pool import BlockPool
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, DeviceBlockId, Rank, RequestId
from kvoffload.model.wire import JobReport, TransferReport
from kvoffload.telemetry.policies import PolicyChoice
from kvoffload_reference.scheduler import PoolDevice
from tests.bench.lines import Line
from tests.bench.results import add_output_arguments, give_out
from tests.bench.trace_file import GROUP, SECONDS_IN, Prompt, Trace, read_trace
from tests.bench.workloads import WORKLOADS, draw_workload, live_blocks

POLICIES = ("eager", "lazy", "twice", "auto")
HOSTS = (0.5, 1.0, 2.0, 4.0, 8.0)
DEVICES = (0.25, 0.5)
_STEP_TOKENS = 8192
_AT_ONCE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines, may be gzipped (default: drawn workloads)"
    )
    number = partial(parser.add_argument, type=positive)
    number("--block-tokens", help="the tokens of a hash (default: what the trace's hashes and lengths allow)")
    parser.add_argument("--time-unit", choices=SECONDS_IN, help="unit of timestamps")
    number("--requests", default=6000, help="requests of a drawn workload (default 6000)")
    sizes = partial(parser.add_argument, type=float, nargs="+", metavar="TIMES")
    sizes("--hosts", default=list(HOSTS), help="sizes of the host, in live sets")
    sizes("--devices", default=list(DEVICES), help="sizes of the device, in live sets")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.trace is not None:
        traces = {args.trace.stem: read_trace(args.trace, args.block_tokens, args.time_unit)}
    else:
        traces = {name: draw_workload(name, args.requests) for name in WORKLOADS}
    method = f"the real core; {_AT_ONCE} requests at once, steps of {_STEP_TOKENS} tokens; share of prompt tokens that device and host have"
    lines = (one for name, trace in traces.items() for one in _measure(name, trace, args.hosts, args.devices))
    return give_out("policies", args, method, lines)


def _measure(name: str, trace: Trace, hosts: Sequence[float], devices: Sequence[float]) -> Iterator[Line]:
    for device, host, policy in product(devices, hosts, POLICIES):
        found = 100 * replay(trace, policy, device, host).found
        yield Line(f"{name}, device {device:g}, host {host:g}, {policy}", found, unit=" %")


class Replayed(NamedTuple):
    found: float  #: the share of prompt tokens that the device or the host had
    moves: Sequence[str]  #: the policies that `auto` chose


def replay(trace: Trace, policy: str, device: float, host: float) -> Replayed:
    """Run a trace's requests on an engine whose device and host have these multiples of the live set."""
    live = live_blocks(trace.prompts)
    longest = max(len(prompt.keys) for prompt in trace.prompts) + 1
    engine = Engine(
        policy, max(int(device * live), longest + 8, 80), max(int(host * live), 1), trace.block_tokens
    )
    for prompt in trace.prompts:
        engine.serve(prompt)
    return Replayed(engine.count["found"] / engine.count["tokens"], engine.moves)


class Engine:
    """An engine's scheduler with the real core, without a model.

    Args:
        policy: the store policy.
        device: the device's number of blocks; the longest prompt must fit.
        host: the host's number of slots.
        block_tokens: the tokens of a block.
    """

    def __init__(self, policy: str, device: int, host: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._host = host
        self._pool = BlockPool(device + 1)
        group = GroupSpec(GROUP, AttentionKind.FULL, block_tokens)
        shape = EngineShape((group,), ranks=1, device_blocks=device, step_tokens=_STEP_TOKENS)
        self.core = OffloadCore(shape, Policy(policy), PoolDevice(self._pool))
        self._running: deque[tuple[RequestId, int, list[int]]] = deque()
        self.choice = PolicyChoice(self.core.policies) if policy == "auto" else None
        self.count: Counter[str] = Counter()
        self.moves: list[str] = []
        self._now = 0.0
        self._step()

    def serve(self, prompt: Prompt) -> None:
        """Compute a prompt, or load what the host has of it."""
        self.count["requests"] += 1
        name = RequestId(str(self.count["requests"]))
        self._choose(prompt)
        seen = facts.RequestSeen(
            name,
            prompt.tokens,
            (prompt.keys,),
            session=prompt.session,
            is_last_turn=prompt.is_last_turn,
        )
        self._now = prompt.at_s
        self.core.request_seen(seen, self._now)
        hit, loaded = self._admit(name, prompt)
        done = (len(hit) + loaded) * self._block_tokens
        self._pool.hold(hit)
        table = hit + self._pool.allocate(loaded)
        tokens = loaded * self._block_tokens
        self.core.blocks_allocated(facts.BlocksAllocated(name, (_ids(table),), done - tokens, tokens))
        self.count["tokens"] += prompt.tokens
        self.count["found"] += done
        self._step()
        self._index(table, prompt.keys, len(hit))
        self._compute(name, prompt, table, done)
        self._running.append((name, prompt.tokens, table))
        if len(self._running) == _AT_ONCE:
            self._end_oldest()

    def _choose(self, prompt: Prompt) -> None:
        if self.choice is None:
            return
        core, choice = self.core, self.choice
        choice.set_sizes(self._pool.usable_blocks, self._host)
        choice.request(prompt.keys, self._most_hits(prompt))
        choice.decide(core.store_policy, core.policies)
        if choice.chosen not in (None, core.store_policy):
            core.policy_chosen(facts.StorePolicyChosen(choice.chosen, dict(choice.found())))
            self.moves.append(core.store_policy)

    def _most_hits(self, prompt: Prompt) -> int:
        return min((prompt.tokens - 1) // self._block_tokens, len(prompt.keys))  # one token must be computed

    def _admit(self, name: RequestId, prompt: Prompt) -> tuple[list[int], int]:
        """Return the device's hit, and how many further blocks the host has, once the request's blocks fit."""
        need = -(-prompt.tokens // self._block_tokens)
        while True:
            hit: list[int] = []
            for key in prompt.keys[: self._most_hits(prompt)]:
                if (block := self._pool.cached_block(key)) is None:
                    break
                hit.append(block)
            found = self.core.lookup(name, len(hit) * self._block_tokens, may_wait=True)
            free = self._pool.free_blocks - sum(map(self._pool.is_free, hit))
            if found is not None and need - len(hit) <= free:
                return hit, found // self._block_tokens
            if self._running:
                self._end_oldest()
            else:
                self._step()

    def _compute(self, name: RequestId, prompt: Prompt, table: list[int], done: int) -> None:
        while done < prompt.tokens:
            first, done = done // self._block_tokens, min(prompt.tokens, done + _STEP_TOKENS)
            new = self._pool.allocate(max(-(-done // self._block_tokens) - len(table), 0))
            table += new
            self._index(table, prompt.keys[: done // self._block_tokens], first)
            self._step(facts.Progress(name, done, (_ids(new),), ((),)))

    def _index(self, table: Sequence[int], keys: Sequence[BlockKey], first: int) -> None:
        for block, key in zip(table[first:], keys[first:], strict=False):
            self._pool.index(block, key)

    def _end_oldest(self) -> None:
        name, tokens, table = self._running.popleft()
        self.core.request_ended(facts.RequestEnded(name, tokens, ((),)))
        self._pool.release(table[::-1])
        self._step()

    def _step(self, *progress: facts.Progress) -> None:
        self.count["steps"] += 1
        self.core.step_scheduled(facts.StepScheduled(self.count["steps"], progress), self._now)
        done = [
            JobReport(job.id, job.direction, CopyOutcome.DONE, 0, 0.0, 0.0) for job in self.core.plan().jobs
        ]
        self.core.state.reported(TransferReport(Rank(0), tuple(done), self._host))
        self.core.take_results()
        self.core.state.tally.take(everything=True)


def _ids(blocks: Sequence[int]) -> tuple[DeviceBlockId, ...]:
    return tuple(map(DeviceBlockId, blocks))
