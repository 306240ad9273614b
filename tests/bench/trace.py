"""Counts how many prompt tokens of a production trace each tier finds, with a simple model and with the real
core.

A trace is a file of JSON lines with `timestamp`, `input_length` (tokens) and `hash_ids`, one hash for each block of
the prompt's tokens. Mooncake and Qwen-Bailian publish such traces.

In the simple model, a tier is a table of keys in the order of use. The real core gets the same requests with the
same capacities; its copies end at once and copy nothing. A trace has the keys of an answer only if a later prompt
contains the answer.
"""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.checks.options import positive
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.core.tiers import DiskTier, NodeTier, RemoteTier
from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import BlockKey, Rank, RequestId, SlotId
from kvoffload.model.wire import (
    AnyJob,
    Direction,
    JobReport,
    NodeSlot,
    Tier,
    TierStatus,
    TransferReport,
)
from tests.bench.engineless import CountedBlocks
from tests.bench.lines import Line
from tests.bench.results import add_output_arguments, give_out
from tests.bench.trace_file import GROUP, SECONDS_IN, Prompt, Trace, read_trace
from tests.core.below import statuses

_BATCH = 64  # the most keys that one call to the remote tier reads or writes
_DEVICE_TOKENS = 2**21
_CONVERSATION_TOKENS = 1024  # prompts that begin with the same tokens belong to one conversation
# The most engines and requests for the real core, which is slower than the simple model.
_CORE_ENGINES, _CORE_REQUESTS = 64, 4000
A_MACHINE = 8
"""How many engines run on a machine."""
_MANY = 1000
_GBIT = 1e9 / 8
_SPEEDS = (10, 25, 100, 400)


class Tiers(NamedTuple):
    """The tiers of an engine.

    Args:
        name: a description of the tiers.
        host: the host tier's capacity, in blocks.
        disk: the disk tier's capacity, in blocks; 0 without a disk tier.
        share_after: the number of hits after which a block is written to the remote tier; None without a remote tier.
        node: whether the engines of a machine read each other's host memory.
    """

    name: str
    host: int
    disk: int = 0
    share_after: int | None = None
    node: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="JSON lines, may be gzipped"
    )
    number = partial(parser.add_argument, type=positive)
    number("--block-tokens", help="the tokens of a hash (default: what the trace's hashes and lengths allow)")
    unit = "of timestamps (default: ms, if that is plausible)"
    parser.add_argument("--time-unit", choices=SECONDS_IN, help=unit)
    engines = f"on paper, and up to {_CORE_ENGINES} of them with the real core (default 8 64 1000)"
    number("--engines", nargs="+", default=[8, 64, 1000], help=engines)
    number("--host-gib", default=256, help="host memory of an engine (default 256)")
    number("--disk-gib", default=2048, help="disk of an engine (default 2048)")
    number("--kv-bytes", default=327_680, help="a token's KV (default: Llama 3.1 70B in bfloat16)")
    number("--prefill", default=10_000, help="tokens/s that an engine computes (default 10000, assumed)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    trace = read_trace(args.trace, args.block_tokens, args.time_unit)
    prompts = trace.prompts
    method = (
        f"{len(prompts)} requests of a trace over {prompts[-1].at_s - prompts[0].at_s:.0f} s, in blocks of {trace.block_tokens} tokens, "
        f"spread over the engines: in turn, or by the prompt's first {_CONVERSATION_TOKENS} tokens, so that a conversation stays where it "
        f"is (sticky). {A_MACHINE} engines share a machine. {args.host_gib} GiB of host memory, {args.disk_gib} GiB of disk, a "
        f"store without bound; {args.kv_bytes} bytes of KV a token, {args.prefill} tokens/s of prefill, both assumed. Hits are tokens of "
        "prompts that need not be computed; the device's own cache counts as the host's."
    )
    return give_out("trace", args, method, _measure(args, trace))


def route(trace: Trace, engines: int, *, is_sticky: bool) -> list[int]:
    places: dict[BlockKey, int] = {}
    last = max(_CONVERSATION_TOKENS // trace.block_tokens, 1) - 1
    return [
        places.setdefault(prompt.keys[last], number % engines)
        if is_sticky and len(prompt.keys) > last
        else number % engines
        for number, prompt in enumerate(trace.prompts)
    ]


# -- the simple model -------------------------------------------------------------------------------------------


class PaperEngine:
    """The simple model of one engine's tiers.

    Args:
        tiers: the engine's tiers.
        store: the keys in the remote tier, which all engines share.
        block_tokens: the tokens of a block.
        machine: the engines of one machine.
    """

    def __init__(
        self, tiers: Tiers, store: set[BlockKey], block_tokens: int, machine: Sequence[PaperEngine] = ()
    ) -> None:
        self._block_tokens = block_tokens
        self._machine = machine if tiers.node else ()
        self._tiers = tiers
        self._store = store
        # The number of hits of each block on the host, the least recently used block first.
        self._host: OrderedDict[BlockKey, int] = OrderedDict()
        self._disk: OrderedDict[BlockKey, None] = OrderedDict()
        self.count: Counter[str] = Counter()

    def serve(self, prompt: Prompt) -> None:
        """Look up a prompt, count the tokens found, and store all of the prompt's blocks."""
        count, found = self.count, 0
        usable = prompt.keys[: (prompt.tokens - 1) // self._block_tokens]  # one token must be computed
        asked = [key for key in usable if key not in self._host and key not in self._disk]
        count["asked"] += len(asked) if self._tiers.share_after is not None else 0
        fetched, read = 0, list[BlockKey]()
        for key in usable:
            if key in self._host:
                self._host[key] += 1
            elif any(key in other._host for other in self._machine):
                count["read"] += 1
            elif key in self._disk:
                read.append(key)
            elif self._tiers.share_after is not None and key in self._store:
                fetched += 1
            else:
                break
            found += 1
        for key in reversed(read):
            self._disk.move_to_end(key)
        count["tokens"] += prompt.tokens
        count["hit"] += found * self._block_tokens
        count["fetched"] += fetched
        count["fetches"] += -(-fetched // _BATCH)
        self._keep(prompt.keys, found)

    def _keep(self, keys: Sequence[BlockKey], found: int) -> None:
        """Store a prompt's blocks, the deepest first, so that the deepest are evicted first."""
        put = 0
        for at in reversed(range(len(keys))):
            hits = self._host.get(keys[at], int(at < found))
            self._host[keys[at]] = hits
            self._host.move_to_end(keys[at])
            put += self._shares(keys[at], hits)
            if hits and self._tiers.disk:
                self._disk[keys[at]] = None
        while len(self._host) > self._tiers.host:
            self._host.popitem(last=False)
        while len(self._disk) > self._tiers.disk:
            self._disk.popitem(last=False)
        self.count["put"] += put
        self.count["puts"] += -(-put // _BATCH)

    def _shares(self, key: BlockKey, hits: int) -> bool:
        after = self._tiers.share_after
        if after is None or hits < after or key in self._store:
            return False
        self._store.add(key)
        return True


# -- the real core ----------------------------------------------------------------------------------------------


class CoreEngine:
    """The real core of one engine, which serves one request after the other. Copies end at once.

    Args:
        tiers: the engine's tiers.
        store: the keys in the remote tier, which all engines share.
        block_tokens: the tokens of a block.
        machine: the engines of one machine.

    Attributes:
        pool: the host's slots.
        fetched: the keys that the last request has fetched from other engines of the machine.
    """

    def __init__(
        self, tiers: Tiers, store: set[BlockKey], block_tokens: int, machine: Sequence[CoreEngine] = ()
    ) -> None:
        self.machine = machine
        self.fetched: set[BlockKey] = set()
        self._store = store
        self._block_tokens = block_tokens
        device_blocks = -(-_DEVICE_TOKENS // block_tokens)
        self._device = CountedBlocks(device_blocks)
        group = GroupSpec(GROUP, AttentionKind.FULL, block_tokens)
        shape = EngineShape((group,), ranks=1, device_blocks=device_blocks, step_tokens=_DEVICE_TOKENS)
        kinds = (
            (NodeTier, 1 if tiers.node else None),
            (DiskTier, 1 if tiers.disk else None),
            (RemoteTier, tiers.share_after),
        )
        policy = Policy(tiers=tuple([(kind, hits) for kind, hits in kinds if hits is not None]))
        self._core = OffloadCore(shape, policy, self._device)
        self._works = tiers.share_after is not None
        self._slots, self._steps, self._served = tiers.host, 0, 0
        self.count: Counter[str] = Counter()
        self.pool = self._core.state.pool
        below = self._core.tier_store
        if (node := self._core.state.node) is not None:
            node.neighbours = self
            below.opened(facts.TierOpened(Tier.NODE, "trace"))
        self._report()
        if tiers.disk:
            places = tuple(map(SlotId, range(tiers.disk)))
            below.restored(facts.TierRestored(Tier.DISK, tiers.disk, free=places, is_last=True))
        if self._works:
            below.opened(facts.TierOpened(Tier.REMOTE, "trace"))

    @property
    def is_empty(self) -> bool:
        return len(self.machine) < 2

    def find(self, keys: Sequence[BlockKey], /) -> list[BlockKey]:
        others = [other.pool.index for other in self.machine if other is not self]
        return [key for key in keys if any(key in index for index in others)]

    def places(self, keys: Sequence[BlockKey], /) -> list[NodeSlot]:
        return [NodeSlot()] * len(keys)  # nothing is copied

    def serve(self, prompt: Prompt) -> None:
        """Run one request from its arrival to its end, and all of its copies."""
        core, self._served = self._core, self._served + 1
        self.fetched.clear()
        name = RequestId(str(self._served))
        core.request_seen(facts.RequestSeen(name, prompt.tokens, (prompt.keys,)))
        self._answer()
        while (hit := core.lookup(name, 0, may_wait=True)) is None:
            self._step()
        table = self._device.take(-(-prompt.tokens // self._block_tokens))
        core.blocks_allocated(facts.BlocksAllocated(name, (table,), 0, hit))
        self._device.keys.update(zip(table, prompt.keys, strict=False))
        self._step()
        self._step(facts.Progress(name, prompt.tokens, ((),), ((),)))
        core.request_ended(facts.RequestEnded(name, prompt.tokens, ((),)))
        self._device.release(table[::-1])
        while core.has_work:
            self._step()
        self.count["tokens"] += prompt.tokens
        self.count["hit"] += hit

    def _answer(self) -> None:
        remote, lower = self._core.state.asked, self._core.lower_tiers
        for request, keys in remote.take_for_catalog() if remote is not None else ():
            self.count["asked"] += len(keys)
            found = tuple(key for key in keys if key in self._store)
            missing = tuple(key for key in keys if key not in self._store)
            lower.answered(facts.TierAnswered(Tier.REMOTE, request, "trace", found, missing))

    def _step(self, *progress: facts.Progress) -> None:
        self._steps += 1
        self._core.step_scheduled(facts.StepScheduled(self._steps, progress))
        self._report(*map(self._copied, self._core.plan().jobs))
        self._core.take_results()
        self._core.state.tally.take(everything=True)
        if (disk := self._core.state.by_name.get(Tier.DISK)) is not None:
            disk.take_for_catalog()

    def _copied(self, job: AnyJob) -> JobReport:
        is_store = job.direction is Direction.STORE
        sums = (0,) * len(job.slots) if job.tier is Tier.DISK and is_store else ()
        if job.tier is Tier.NODE:
            self.count["read"] += len(job.targets)
            self.fetched.update([key for slot in job.slots if (key := self.pool.key(slot)) is not None])
        if job.tier is Tier.REMOTE:
            what, calls = ("put", "puts") if is_store else ("fetched", "fetches")
            self.count[what] += len(job.targets)
            self.count[calls] += -(-len(job.targets) // _BATCH)
            if is_store:
                self._store.update(job.targets)
        return JobReport(job.id, job.direction, CopyOutcome.DONE, 0, 0.0, 0.0, sums=sums)

    def _report(self, *jobs: JobReport) -> None:
        below = statuses(remote_works=self._works or None)
        if self._core.state.node is not None:
            below += (TierStatus(Tier.NODE, True),)
        report = TransferReport(Rank(0), jobs, self._slots, below=below)
        self._core.state.reported(report)


# -- results ----------------------------------------------------------------------------------------------------


def play(
    kind: type[PaperEngine | CoreEngine],
    tiers: Tiers,
    trace: Trace,
    engines: int,
    *,
    is_sticky: bool = False,
) -> Counter[str]:
    """Run the requests on `engines` engines, `A_MACHINE` on each machine; return the sums of all engines' counts."""
    store: set[BlockKey] = set()
    all_of_them: dict[int, PaperEngine | CoreEngine] = {}
    machines: defaultdict[int, list[Any]] = defaultdict(list)
    for number, prompt in zip(route(trace, engines, is_sticky=is_sticky), trace.prompts, strict=True):
        if number not in all_of_them:
            machine = machines[number // A_MACHINE]
            all_of_them[number] = kind(tiers, store, trace.block_tokens, machine)
            machine.append(all_of_them[number])
        all_of_them[number].serve(prompt)
    total = sum((engine.count for engine in all_of_them.values()), Counter[str]())
    total["stored"] = len(store)
    return total


def _measure(args: argparse.Namespace, trace: Trace) -> Iterator[Line]:
    gib = args.kv_bytes * trace.block_tokens / 2**30
    host, disk = int(args.host_gib / gib), int(args.disk_gib / gib)
    setups = [
        Tiers("host", host),
        Tiers("host, node", host, node=True),
        Tiers("host, disk", host, disk),
        Tiers("host, store after a hit", host, 0, 1),
        Tiers("host, store of all", host, 0, 0),
        Tiers("host, disk, store of all", host, disk, 0),
    ]
    bound = play(PaperEngine, Tiers("all", 10**9), trace, 1)
    yield _hit("one host without bound", bound)
    yield Line(
        "speed of an engine's network from which a fetch beats computing",
        args.kv_bytes * args.prefill / _GBIT,
        unit=" Gbit/s",
    )
    for engines, is_sticky, tiers in product(args.engines, (False, True), setups):
        count = play(PaperEngine, tiers, trace, engines, is_sticky=is_sticky)
        what = f"{engines} engines, {'sticky' if is_sticky else 'in turn'}, {tiers.name}"
        yield _hit(what, count)
        if tiers.share_after is not None and not tiers.disk:
            yield from _network(what, args, trace, engines, count)
    few = trace._replace(prompts=trace.prompts[:_CORE_REQUESTS])
    for engines, tiers in product((number for number in args.engines if number <= _CORE_ENGINES), setups):
        for name, kind in (("core", CoreEngine), ("paper", PaperEngine)):
            what = f"{name}, the first {len(few.prompts)} requests, {engines} engines, in turn, {tiers.name}"
            yield _hit(what, play(kind, tiers, few, engines))


def _hit(what: str, count: Counter[str]) -> Line:
    return Line(f"{what}: tokens hit", 100 * count["hit"] / count["tokens"], unit=" %")


def _network(
    what: str, args: argparse.Namespace, trace: Trace, engines: int, count: Counter[str]
) -> Iterator[Line]:
    """Yield the load on the remote tier and the network; for the least engines, also extrapolated to `_MANY`."""
    prompts = trace.prompts
    seconds = max(prompts[-1].at_s - prompts[0].at_s, 1.0)
    block = args.kv_bytes * trace.block_tokens
    keys = count["asked"] + count["fetched"] + count["put"]
    rates = {
        "read from the store": (count["fetched"] * block / 1e9, " GB/s"),
        "written to the store": (count["put"] * block / 1e9, " GB/s"),
        "calls to the store": (len(prompts) + count["fetches"] + count["puts"], "/s"),
        "keys in these calls": (keys, "/s"),
    }
    yield Line(f"{what}: in the store in the end", count["stored"] * block / 1e12, unit=" TB")
    for name, (total, unit) in rates.items():
        yield Line(f"{what}: {name}", total / seconds, unit=unit)
        if engines == args.engines[0]:
            many = f"extrapolated to {_MANY:,} engines, each as busy as one of {what}"
            yield Line(f"{many}: {name}", total / seconds * _MANY / engines, unit=unit)
    for gbit in _SPEEDS:
        fetch_s = count["fetched"] * (block / (gbit * _GBIT) - trace.block_tokens / args.prefill)
        saved = -100 * fetch_s * args.prefill / count["tokens"]
        yield Line(f"{what}: of prefill time saved by the store at {gbit} Gbit/s", saved, unit=" %")
