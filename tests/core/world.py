"""A small simulated engine for tests of the core. It tracks the contents of every block.

A prompt is a text, and a token is one character. A block contains the text up to its last token, so every
wrong copy, reuse or hit shows as a wrong text. The test decides when a request is admitted, when a step runs,
and when each rank's copy ends. Bytes are copied at the end of the copy. After every fact, the world checks
its invariants and audits the core.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar

from kvoffload.core.machine import JobState, SlotState
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.slots import SlotPool
from kvoffload.core.state import LoadResults, Policy
from kvoffload.model import facts
from kvoffload.model.causes import (
    CopyOutcome,
    DegradeCause,
    LoadOutcome,
    MissCause,
    StoreOutcome,
    TierOutcome,
)
from kvoffload.model.engine import EngineShape, Promises
from kvoffload.model.events import (
    BlocksAdopted,
    BlocksEvicted,
    BlocksOffered,
    Event,
    LoadEnded,
    LookupAnswered,
    StoreEnded,
    TierCopyEnded,
)
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import NULL_BLOCK, BlockKey, DeviceBlockId, GroupId, JobId, Rank, RequestId, SlotId
from kvoffload.model.wire import (
    AnyJob,
    DeviceJob,
    Direction,
    JobReport,
    Put,
    Tier,
    TierStatus,
    TransferPlan,
    TransferReport,
)
from tests.core.audit import audit
from tests.core.fingerprint import fingerprint
from tests.keys import block_key

DONE, FAILED, CORRUPT = CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.CORRUPT
GARBAGE = BlockKey(b"garbage")
# Three whole blocks of `full()`, and one more token, which the engine must compute.
TEXT = "abcdefghijklm"

E = TypeVar("E", bound=Event)


def full(block_tokens: int = 4, group: int = 0, *, has_lookahead: bool = False) -> GroupSpec:
    return GroupSpec(GroupId(group), AttentionKind.FULL, block_tokens, has_lookahead=has_lookahead)


def window(tokens: int, block_tokens: int = 4, group: int = 0, *, has_lookahead: bool = False) -> GroupSpec:
    return GroupSpec(
        GroupId(group), AttentionKind.SLIDING_WINDOW, block_tokens, tokens, has_lookahead=has_lookahead
    )


def chunked(tokens: int, block_tokens: int = 4, group: int = 0) -> GroupSpec:
    return GroupSpec(GroupId(group), AttentionKind.CHUNKED_LOCAL, block_tokens, tokens)


def recurrent(block_tokens: int = 4, group: int = 0) -> GroupSpec:
    return GroupSpec(GroupId(group), AttentionKind.RECURRENT, block_tokens)


def key_at(text: str, end: int, group: int = 0) -> BlockKey:
    """Return the key of the block whose last token is at `end - 1`."""
    return block_key(text[:end].encode(), GroupId(group))


def keys_of(text: str, group: GroupSpec) -> list[BlockKey]:
    return [key_of(text, group, position) for position in range(len(text) // group.block_tokens)]


def key_of(text: str, group: GroupSpec, position: int) -> BlockKey:
    return key_at(text, (position + 1) * group.block_tokens, group.group)


def holds(held: BlockKey | None, key: BlockKey, shape: EngineShape) -> bool:
    """Return whether contents may be used for a key: with tails, a block of attention may hold later tokens, too."""
    if held is None or not shape.tail_tokens or key[-4:] in shape.state_key_ends:
        return held == key
    return held.startswith(key[:-4]) and held[-4:] == key[-4:]


def left_behind(core: OffloadCore) -> dict[str, object]:
    """Return the state that requests, jobs and hits have left in the core, by name.

    Nothing may be left after the drain (R11).
    """
    state, pool = core.state, core.state.pool
    kept = {
        "pins": pool.pins,
        "holds": pool.holds,
        "leases": state.leases.counts,
        "requests": (*state.requests.live.values(), *state.requests.finishing),
        "jobs": (*state.jobs.open.values(), *state.jobs.planned),
        "keys in flight": core.stores.in_flight.keys,
        "duplicates": core.stores.in_flight.duplicates,
        "loads that others wait for": state.requests.loading,
        "device blocks reserved": state.requests.reserved,
        "a device that is full": state.requests.is_full,
        "keys watched for eviction": core.stores.evictions.watches,
        "entries in tables": state.tables.entries,
        "shared entries in tables": state.tables.shared,
        "offers that wait for room": core.stores.for_room,
        "offers to make again": core.stores.again,
        "new tables": core._new,
    }
    for tier in state.tiers:
        kept |= {
            f"pins of {tier.tier.value}": tier.pool.pins,
            f"spills to {tier.tier.value}": tier.in_flight.keys,
            f"fetches from {tier.tier.value}": tier.fetching,
        }
    return {what: there for what, there in kept.items() if there}


def needed_blocks(group: GroupSpec, length: int) -> range:
    """Return the positions of the blocks needed to compute from token `length` on."""
    return range(group.first_needed_token(length) // group.block_tokens, length // group.block_tokens)


def _blocks_gained(event: Event) -> int:
    """Return how many more blocks can hit on the host."""
    if isinstance(event, BlocksEvicted):
        return -event.blocks
    if isinstance(event, BlocksAdopted):
        return event.blocks
    if isinstance(event, StoreEnded):
        return event.blocks if event.outcome is StoreOutcome.STORED else 0
    if isinstance(event, TierCopyEnded) and event.direction is Direction.LOAD:
        return event.blocks if event.outcome is TierOutcome.DONE else 0
    return 0


def _by_outcome(ended: Iterable[StoreEnded | LoadEnded]) -> dict[Any, int]:
    blocks: Counter[object] = Counter()
    for event in ended:
        blocks[event.outcome] += event.blocks
    return dict(blocks)


class DevicePool:
    """Device blocks: their owners, their leases, their entries in the engine's index, and their contents."""

    def __init__(self, blocks: int, ranks: int) -> None:
        self.size = blocks
        self.free: OrderedDict[DeviceBlockId, None] = OrderedDict.fromkeys(
            map(DeviceBlockId, range(1, blocks + 1))
        )
        self.held: Counter[DeviceBlockId] = Counter()
        self.leased: Counter[DeviceBlockId] = Counter()
        self.keys: dict[DeviceBlockId, BlockKey] = {}
        self.index: dict[BlockKey, dict[DeviceBlockId, None]] = {}
        self.bytes: list[dict[DeviceBlockId, BlockKey]] = [{} for _ in range(ranks)]

    # -- what the core borrows ----------------------------------------------------------------------------------

    def lease(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._refer(self.leased, blocks)

    def release(self, blocks: Sequence[DeviceBlockId]) -> None:
        self._unrefer(self.leased, blocks)

    def next_evictable(self, count: int) -> Iterable[DeviceBlockId]:
        return list(islice(self.free, count))

    def free_blocks(self) -> int:
        return len(self.free)

    def keys_of(self, blocks: Sequence[DeviceBlockId]) -> list[BlockKey | None]:
        return [self.keys.get(block) for block in blocks]

    def block_of(self, key: BlockKey) -> DeviceBlockId | None:
        return next(iter(self.index.get(key, ())), None)

    # -- what the engine does -----------------------------------------------------------------------------------

    def hand_out(self, count: int) -> list[DeviceBlockId]:
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            assert not self.held[block], f"block {block} is held"
            assert not self.leased[block], f"block {block} is leased"
            self._forget_key(block)
            for each in self.bytes:
                each[block] = GARBAGE
        self.hold(blocks)
        return blocks

    def hold(self, blocks: Iterable[DeviceBlockId]) -> None:
        self._refer(self.held, blocks)

    def unhold(self, blocks: Iterable[DeviceBlockId]) -> None:
        self._unrefer(self.held, blocks)

    def name(self, block: DeviceBlockId, key: BlockKey) -> None:
        self._forget_key(block)
        self.keys[block] = key
        self.index.setdefault(key, {})[block] = None

    def forget_keys(self) -> None:
        """Empty the engine's own prefix cache."""
        self.keys.clear()
        self.index.clear()

    def contents(self, block: DeviceBlockId) -> list[BlockKey]:
        """Return what each rank holds in this block."""
        return [held[block] for held in self.bytes]

    def problems(self) -> list[str]:
        used = {block for counts in (self.held, self.leased) for block in counts}
        found = [f"block {block} is free and in use" for block in used & self.free.keys()]
        if len(used) + len(self.free) != self.size:
            found.append(f"{len(used)} used and {len(self.free)} free of {self.size}")
        return found

    def _refer(self, counts: Counter[DeviceBlockId], blocks: Iterable[DeviceBlockId]) -> None:
        for block in blocks:
            assert block != NULL_BLOCK
            counts[block] += 1
            self.free.pop(block, None)

    def _unrefer(self, counts: Counter[DeviceBlockId], blocks: Iterable[DeviceBlockId]) -> None:
        for block in blocks:
            assert counts[block] > 0, f"block {block} was given back once too often"
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
            if block not in self.held and block not in self.leased:
                self.free[block] = None
                if block not in self.keys:
                    self.free.move_to_end(block, last=False)

    def _forget_key(self, block: DeviceBlockId) -> None:
        key = self.keys.pop(block, None)
        if key is not None:
            del self.index[key][block]
            if not self.index[key]:
                del self.index[key]


@dataclass
class Req:
    name: RequestId
    text: str
    state: str = "waiting"  # "waiting", "loading", "running" or "ended"
    tables: list[list[DeviceBlockId]] = field(default_factory=list)
    computed: int = 0
    reported_keys: list[int] = field(default_factory=list)
    prompt: str = ""
    # the tokens found on the device and on the host at the last admission
    brought: tuple[int, int] = (0, 0)

    def held(self) -> list[DeviceBlockId]:
        """Return the request's blocks, deepest first."""
        return [block for table in self.tables for block in reversed(table) if block != NULL_BLOCK]


@dataclass
class Copy:
    """A submitted job, and the ranks on which its copy is still running."""

    job: AnyJob
    running: set[Rank]

    @property
    def blocks(self) -> tuple[DeviceBlockId, ...]:
        return self.job.targets if self.job.tier is Tier.HOST else ()


def slots_written(job: AnyJob) -> tuple[SlotId, ...]:
    """Return the host slots that a job writes: those of stores and fetches."""
    return job.slots if (job.tier is Tier.HOST) == (job.direction is Direction.STORE) else ()


class World:
    """An engine with several ranks, and the core that handles the engine's facts.

    With `keeps`, host memory outlives the engine: the world has the table that the next engine would find, and checks
    after each fact that everything in it may be found. With `kept`, this is the next engine.
    """

    def __init__(
        self,
        *groups: GroupSpec,
        ranks: int = 1,
        device: int = 64,
        host: int = 64,
        policy: str = "eager",
        least: int = 0,
        report_every: int = 1,
        step_tokens: int = 8,
        tail_tokens: int = 0,
        promises: Promises | None = None,
        is_growing: bool = False,
        keeps: bool = False,
        kept: World | None = None,
    ) -> None:
        self.groups = groups or (full(),)
        self.ranks = [Rank(rank) for rank in range(ranks)]
        shape = EngineShape(
            self.groups, ranks, device, step_tokens, tail_tokens=tail_tokens, promises=promises or Promises()
        )
        self.shape = shape
        self.device = DevicePool(device, ranks)
        self.core = self._make_core(Policy(policy, least, keeps_host=keeps))
        self.host: list[dict[SlotId, BlockKey]] = [{} for _ in self.ranks] if kept is None else kept.host
        self.table: dict[SlotId, BlockKey] = {} if kept is None else kept.table
        self.unsettled: set[SlotId] = set() if kept is None else kept.unsettled
        """Slots that a copy may write, as far as the table says."""
        self.withheld = set(self.unsettled)
        """Slots that the core does not get before the processes of the engine before are gone."""
        self.late_writes: set[SlotId] = set() if kept is None else kept.late_writes
        """Slots that a copy of a killed engine may still write."""
        self.is_table_closed = False
        # The slots that were corrupted silently, by rank.
        self.rotten: set[tuple[int, SlotId]] = set() if kept is None else kept.rotten
        self.resets: int = 0 if kept is None else kept.resets
        # How many resets preceded the computation of each block's contents.
        self.device_age: dict[DeviceBlockId, int] = {}
        self.host_age: dict[SlotId, int] = {} if kept is None else kept.host_age
        self.requests: dict[str, Req] = {}
        self.copies: dict[JobId, Copy] = {}
        self.last_reports: dict[Rank, TransferReport] = {}
        self.log: list[Event] = []
        self.blocks_on_host = 0
        """Blocks that can hit on the host, according to the events."""
        self.results: list[tuple[str, bool]] = []
        self.preempted: list[RequestId] = []
        self.persists = True
        self.report_every = report_every
        """While a request generates, progress is reported only every `report_every` steps."""
        self.late: dict[str, list[list[DeviceBlockId]]] = {}
        """For each running request, the blocks that have not been reported yet."""
        self.until_report = report_every
        self.least_from = {Tier.DISK: 0, Tier.REMOTE: 0}
        self.steps = 0
        self.states_end: Collection[int] | None = None
        """The prefix lengths at which recurrent states are kept and handed off; None for all block ends."""
        self.ready = 0
        self.checks_each_fact = True
        self.ready_up_to(host, is_growing=is_growing)

    def _make_core(self, policy: Policy) -> OffloadCore:
        return OffloadCore(self.shape, policy, self.device)

    # -- telling and checking -----------------------------------------------------------------------------------

    def tell(self, fact: facts.Fact) -> None:
        """Pass a fact to the core, as the runtime does, and check all invariants."""
        self.core.handle(fact)
        self._settle()

    def _settle(self) -> None:
        new = self.core.state.tally.take(everything=True)
        for answer in new:
            if isinstance(answer, LookupAnswered):
                assert (answer.cause is None) == (answer.opted_out or not answer.miss_blocks), answer
                assert 0 <= sum(count for _, count in answer.fetched) <= answer.hit_tokens, answer
        self.write_table()
        self.log += new
        self.blocks_on_host += sum(map(_blocks_gained, new))
        results = self.core.take_results()
        live = self.core.state.requests.live
        assert not [name for name in (*results.loaded, *results.failed) if name in live and live[name].hit]
        self._loads_ended(results)
        if self.checks_each_fact:
            self.check()

    def check(self) -> None:
        problems = [*audit(self.core), *self.device.problems()]
        assert not problems, problems
        leases = self.core.state.leases.counts
        assert leases == dict(self.device.leased), "leases and the device's references disagree"
        assert self.blocks_on_host == len(self.core.state.pool.index), "not the blocks that events report"
        for key, slot in self.core.state.pool.index.items():
            assert self.host_age[slot] == self.resets, f"slot {slot} can hit, but is from before the reset"
            for rank, held in enumerate(self.host):
                is_right = holds(held.get(slot), key, self.shape) or (rank, slot) in self.rotten
                assert is_right, f"slot {slot} can hit, but holds {held.get(slot)!r}"
        self._check_table()

    # -- the table of a host that outlives the engine -----------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return self.core.state.policy.keeps_host

    def write_table(self) -> None:
        """Write what has changed to the table, as the runtime does before a plan leaves a hook."""
        if not self.keeps:
            return
        for slot, key, is_unwritten in self.core.state.pool.take_for_catalog():
            self.table.pop(slot, None)
            self.unsettled.discard(slot)
            if key is None and not is_unwritten:
                self.unsettled.add(slot)
            elif key is not None and not self.is_table_closed:
                self.table[slot] = key

    def close_table(self) -> None:
        self.is_table_closed = True
        self.table.clear()

    def _check_table(self) -> None:
        """Check what the next engine would find if this one were killed now."""
        written = {slot for copy in self.copies.values() for slot in slots_written(copy.job)}
        assert not written & self.table.keys(), "the table names a slot that a copy writes"
        if self.keeps:
            assert written <= self.unsettled, "the table does not say that a copy writes the slot"
        pool = self.core.state.pool
        for slot, key in self.table.items():
            is_known = slot >= pool.capacity or pool.indexed_key(slot) == key
            assert is_known, f"the table names slot {slot}, where lookups do not find this block"
            assert self.host_age[slot] == self.resets, (
                f"the table names slot {slot}, which is from before the reset"
            )
            for rank, held in enumerate(self.host):
                is_right = holds(held.get(slot), key, self.shape) or (rank, slot) in self.rotten
                assert is_right, f"the table names {slot} wrongly"

    def die(self, *, loses_tail: bool = False) -> None:
        """Kill the engine. Its open copies may write for a moment longer."""
        for copy in self.copies.values():
            for slot in slots_written(copy.job):
                self.late_writes.add(slot)
                for rank in copy.running:
                    self.host[rank][slot] = GARBAGE

    def adopt(self) -> None:
        """Give the core the slots of the engine before, with what its table names."""
        self.late_writes = {slot for slot in self.late_writes if slot < self.ready}
        slots = range(self.ready)
        puts = tuple([Put(slot, key, ()) for slot, key in sorted(self.table.items()) if slot in slots])
        self.table = {put.slot: put.key for put in puts}
        free = tuple([SlotId(slot) for slot in slots if slot not in self.table and slot not in self.withheld])
        self.tell(facts.TierRestored(Tier.HOST, self.ready, puts, free))
        self.tell(facts.HostGrown(self.ready, is_last=True))

    def late_write(self) -> None:
        """Let copies of the killed engine write once more."""
        for slot in self.late_writes:
            for held in self.host:
                held[slot] = GARBAGE

    def forget_old_processes(self) -> None:
        """Give the core the slots that the killed engine may have written: its processes are gone."""
        self.late_writes.clear()
        free = tuple(sorted(slot for slot in self.withheld if slot < self.ready))
        self.withheld.clear()
        self.unsettled.difference_update(free)
        self.tell(facts.TierRestored(Tier.HOST, self.ready, free=free))

    # -- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        text: str,
        *,
        reads_cache: bool = True,
        limits: facts.Limits = facts.NO_LIMITS,
        session: int = 0,
        is_last_turn: bool = False,
    ) -> Req:
        request = Req(RequestId(name), text, prompt=text)
        self.requests[name] = request
        keys = tuple(tuple(keys_of(text, group)) for group in self.groups)
        request.reported_keys = [len(each) for each in keys]
        hashes = tuple(text[:end].encode() for end in self.ends_of_hashes(text))
        fact = facts.RequestSeen(
            request.name,
            len(text),
            keys,
            reads_cache,
            self.persists,
            limits,
            None,
            hashes,
            session,
            is_last_turn,
        )
        self.tell(fact)
        return request

    def ends_of_hashes(self, text: str) -> range:
        unit = self.shape.tail_tokens
        return range(unit, len(text) + 1, unit) if unit else range(0)

    def lookup(self, request: Req, *, may_wait: bool = True, least: int = 0) -> int | None:
        """Return how many tokens the host adds to the device's hit, or None for "not yet"."""
        for tier, tokens in (self.least_from | {Tier.HOST: least}).items():
            self.core.set_least(tier, tokens)
        answer = self.core.lookup(
            request.name,
            self.device_hit(request),
            may_wait=may_wait,
            tokens=len(request.text),
            new_keys=self._new_keys(request),
        )
        self._settle()
        return answer

    def admit(self, request: Req, *, may_wait: bool = True, accept: int | None = None) -> int | None:
        """Look up and allocate a request. Return how many tokens come from the host, or None for "not yet"."""
        answer = self.lookup(request, may_wait=may_wait)
        if answer is not None:
            self.allocate(request, answer if accept is None else accept)
        return answer

    def allocate(self, request: Req, external: int) -> bool:
        """Allocate a waiting request's first blocks. Return False if too few blocks are free."""
        device = self.device_hit(request)
        seen = device + external
        end = seen if external else min(len(request.text), device + self.shape.step_tokens)
        plan = [self._admission(group, request, device, seen, end) for group in self.groups]
        hits = [block for table in plan for block in table if block]
        fresh = sum(block is None for table in plan for block in table)
        if fresh + sum(block in self.device.free for block in set(hits)) > len(self.device.free):
            return False
        self.device.hold(hits)
        new = iter(self.device.hand_out(fresh))
        request.tables = [[next(new) if block is None else block for block in table] for table in plan]
        request.brought = (device, external)
        request.state = "loading" if external else "running"
        request.computed = device
        tables = tuple(map(tuple, request.tables))
        self.tell(facts.BlocksAllocated(request.name, tables, device, external))
        return True

    def preempt(self, request: Req) -> None:
        """Preempt a running request and free its blocks. The next step reports the preemption to the core."""
        self.device.unhold(request.held())
        request.tables, request.computed, request.state = [], 0, "waiting"
        self.late.pop(request.name, None)
        self.preempted.append(request.name)

    def preempt_and_step(self, request: Req) -> None:
        """Preempt a request, and report this to the core."""
        self.preempt(request)
        self.idle_step()

    def end(self, request: Req) -> None:
        holds = request.state == "running"
        late = tuple(map(tuple, self.late.pop(request.name, ())))
        fact = facts.RequestEnded(request.name, request.computed, self._new_keys(request), holds, late)
        if request.name in self.preempted:
            self.preempted.remove(request.name)
        was, request.state = request.state, "ended"
        if was != "loading":
            del self.requests[request.name]
        self.tell(fact)
        if was == "running":
            self.device.unhold(request.held())
        if self.checks_each_fact:
            self.check()

    def end_and_drain(self, request: Req) -> None:
        self.end(request)
        self.drain()

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, *requests: Req, tokens: int | None = None) -> TransferPlan:
        """Run one step of these requests (by default all running requests), with up to `tokens` tokens each."""
        return self._step(requests or self.running(), tokens or self.shape.step_tokens)

    def idle_step(self) -> TransferPlan:
        return self._step((), 0)

    def step_and_copy(self) -> None:
        """Run one step of all running requests, and end all copies."""
        self.step()
        self.finish()

    def copy_all(self) -> None:
        """Run a step without requests, and end all copies."""
        self.idle_step()
        self.finish()

    def running(self) -> tuple[Req, ...]:
        return tuple(each for each in self.requests.values() if each.state == "running")

    def _step(self, running: Sequence[Req], tokens: int) -> TransferPlan:
        progress, chunks, states = [], [], list[facts.StateHandedOff]()
        tails = [tail for request in running for tail in self._tails(request)]
        copies = [copy for copy, _ in tails]
        reallocated = [copy.target for copy in copies]
        self.until_report = (self.until_report or self.report_every) - 1
        for request in running:
            end = self._end_of_chunk(request, tokens)
            new_blocks = self._grow(request, end)
            if new_blocks is None:
                continue
            chunks.append((request, end))
            made = tuple(self._states(request, end))
            states += made
            late = self.late.setdefault(request.name, [[] for _ in new_blocks])
            for row, more in zip(late, new_blocks, strict=True):
                row += more
            # Only steps of one token may be reported late.
            if made or end - request.computed > 1 or any(tail.request == request.name for _, tail in tails):
                progress.append(self._progress(request.name))
            elif self.until_report:
                reallocated += chain.from_iterable(new_blocks)
        if not self.until_report:
            progress += map(self._progress, tuple(self.late))
        preempted, self.preempted = tuple(self.preempted), []
        self.tell(
            facts.StepScheduled(
                self.steps,
                tuple(progress),
                preempted,
                tuple(reallocated),
                states=tuple(states),
                tails=tuple(tail for _, tail in tails),
                copies=tuple(copies),
            )
        )
        self.steps += 1
        plan = self.submit()
        self.device.unhold(copy.target for copy in copies)
        for request, end in chunks:
            self._compute(request, end)
        return plan

    def _end_of_chunk(self, request: Req, tokens: int) -> int:
        """Return where a step of a request ends. With tails, it stops at the last states to keep, as vLLM does."""
        end = min(len(request.text), request.computed + tokens)
        if not self.shape.tail_tokens:
            return end
        size, last = self.shape.alignment, len(request.prompt) - 1
        stops = (last // size * size, last // self.shape.tail_tokens * self.shape.tail_tokens)
        return min((stop for stop in stops if request.computed < stop < end), default=end)

    def _progress(self, name: str) -> facts.Progress:
        request, late = self.requests[name], tuple(map(tuple, self.late.pop(name)))
        return facts.Progress(request.name, request.computed, late, self._new_keys(request))

    def submit(self) -> TransferPlan:
        plan = self.core.plan()
        self.write_table()
        for job in plan.jobs:
            assert job.slots
            assert len(job.targets) == len(job.slots)
            self.copies[job.id] = Copy(job, set(self.ranks))
        self._settle()
        return plan

    def run(self, request: Req) -> None:
        """Run steps until the request has computed its text. Another step then reports the progress to the core."""
        target = len(request.text)
        while request.computed < target:
            self.step(request)
        self.step(request, tokens=1)

    def admitted(self, name: str, text: str) -> Req:
        """Return a new request that has been looked up and allocated."""
        request = self.add(name, text)
        self.admit(request)
        return request

    def computed(self, name: str = "a", text: str = TEXT) -> Req:
        """Return a new request that has computed its prompt, and whose stores are open."""
        request = self.admitted(name, text)
        self.run(request)
        return request

    def loading(self, name: str = "a", text: str = TEXT) -> Req:
        """Return a new request whose load is open, even if another request is loading the same blocks."""
        request = self.add(name, text)
        self.admit(request, may_wait=False)
        self.step()
        assert request.state == "loading"
        return request

    def load_and_run(self, request: Req) -> None:
        """Let an admitted request load its hit, in one or more parts, and compute the rest of its text."""
        self.step_and_copy()
        while request.state == "loading":
            assert self.core.has_work, f"{request.name} waits for nothing"
            self.step_and_copy()
        self.run(request)

    def only_on_host(self, text: str) -> None:
        """Store a text on the host, and remove it from the device."""
        self.serve("first", text)
        self.device.forget_keys()

    def serve(self, name: str, text: str) -> Req:
        """Serve a request and end all copies. The request's blocks are then on the host, if they fit."""
        request = self.admitted(name, text)
        self.load_and_run(request)
        self.end_and_drain(request)
        return request

    def serve_turn(self, text: str, session: int = 0, *, is_last: bool = False, name: str = "turn") -> None:
        """Serve a turn of a session."""
        request = self.add(name, text, session=session, is_last_turn=is_last)
        self.admit(request)
        self.load_and_run(request)
        self.end_and_drain(request)

    def serve_limited(self, name: str, text: str, limits: facts.Limits) -> None:
        """Serve a request that has limits of its own."""
        request = self.add(name, text, limits=limits)
        self.admit(request)
        self.load_and_run(request)
        self.end_and_drain(request)

    # -- ranks --------------------------------------------------------------------------------------------------

    def ready_up_to(self, slots: int, *, is_growing: bool = False) -> None:
        """Make this many slots ready on every rank. No more slots will follow, unless `is_growing`."""
        self.ready, self.is_growing = slots, is_growing
        for rank in self.ranks:
            self._tell_report(rank)
        if self.keeps and (self.table or self.withheld):
            self.adopt()
        elif self.keeps:
            self.tell(facts.HostGrown(slots, is_last=not is_growing))

    def open_jobs(self, direction: Direction | None = None) -> list[JobId]:
        return [job for job, copy in self.copies.items() if direction in (None, copy.job.direction)]

    def report(
        self, rank: int, job: JobId, outcome: CopyOutcome = DONE, corrupt: tuple[int, ...] = ()
    ) -> None:
        """End one rank's copy. The bytes are not copied before this call."""
        copied = self._end_copy(rank, job)
        assert copied.tier is Tier.HOST
        if outcome is DONE and copied.direction is not Direction.STORE:
            corrupt = tuple(place for place, slot in enumerate(copied.slots) if (rank, slot) in self.rotten)
            outcome = CORRUPT if corrupt else DONE
        self._move_bytes(rank, copied, outcome, corrupt)
        self._tell_report(rank, JobReport(job, copied.direction, outcome, 0, 0.0, 0.0, corrupt))

    def _end_copy(self, rank: int, job: JobId) -> AnyJob:
        copy = self.copies[job]
        copy.running.remove(Rank(rank))
        if not copy.running:
            del self.copies[job]
        return copy.job

    def _tell_report(self, rank: int, *parts: JobReport) -> None:
        self.last_reports[Rank(rank)] = TransferReport(
            Rank(rank), parts, self.ready, is_growing=self.is_growing, below=self._statuses(rank)
        )
        self.tell(facts.TransferReported(self.last_reports[Rank(rank)]))

    def _statuses(self, rank: int) -> tuple[TierStatus, ...]:
        """Return what the rank reports about lower tiers."""
        return ()

    def report_all(self, rank: int, outcome: CopyOutcome = DONE) -> None:
        """End one rank's copies of all open jobs."""
        for job in self.open_jobs():
            self.report(rank, job, outcome)

    def repeat_report(self, rank: int) -> None:
        """Report a rank's last copy a second time. The duplicate must change nothing."""
        before = fingerprint(self.core), len(self.log)
        self.tell(facts.TransferReported(self.last_reports[Rank(rank)]))
        assert (fingerprint(self.core), len(self.log)) == before

    def finish(self, *jobs: JobId, outcome: CopyOutcome = DONE) -> None:
        """End jobs on every rank, by default all open jobs that have not been abandoned."""
        for job in jobs or self.submitted():
            for rank in sorted(self.copies[job].running):
                self.report(rank, job, outcome)

    def submitted(self) -> list[JobId]:
        jobs = self.core.state.jobs
        return [
            job
            for job in self.copies
            if (record := jobs.open.get(job)) and record.state is JobState.SUBMITTED
        ]

    def overdue(self, *jobs: JobId) -> None:
        for job in jobs:
            self.tell(facts.JobOverdue(job))

    def lose(self, key: BlockKey) -> None:
        """Remove a block from the host without an event."""
        pool = self.core.state.pool
        self.blocks_on_host -= pool.invalidate(pool.index[key])

    def rot(self, rank: int, slot: SlotId) -> None:
        """Corrupt a slot of host memory, so that only a checksum can detect the damage."""
        self.rotten.add((rank, slot))
        self.host[rank][slot] = GARBAGE

    def reset(self) -> None:
        self.resets += 1
        self.close_table()
        self.tell(facts.CacheReset())

    def choose(self, policy: str) -> None:
        self.tell(facts.StorePolicyChosen(policy, {}))

    def degrade(self) -> None:
        self.close_table()
        self.tell(facts.InvariantBroken(DegradeCause.INVARIANT_BROKEN, "a test"))

    def drain(self) -> None:
        """Run steps without requests until only abandoned jobs are pending."""
        for _ in range(100):
            if not self.core.has_work:
                return
            self.copy_all()
        raise AssertionError("work without end")

    # -- what the core said -------------------------------------------------------------------------------------

    def reported(self, kind: type[E]) -> list[E]:
        return [event for event in self.log if isinstance(event, kind)]

    def stores(self) -> dict[StoreOutcome, int]:
        return _by_outcome(self.reported(StoreEnded))

    def loads(self) -> dict[LoadOutcome, int]:
        return _by_outcome(self.reported(LoadEnded))

    def miss(self) -> MissCause | None:
        """Return why the last admission's lookup did not find more blocks."""
        return self.reported(LookupAnswered)[-1].cause

    def next_miss(self, text: str = TEXT) -> MissCause | None:
        """Empty the device's cache and admit a new request; return why it did not find more blocks."""
        self.device.forget_keys()
        self.admitted("next", text)
        return self.miss()

    def offered(self) -> int:
        return sum(event.blocks for event in self.reported(BlocksOffered))

    def evicted(self) -> int:
        return sum(event.blocks for event in self.reported(BlocksEvicted))

    def on_host(self, text: str, group: int = 0) -> str:
        """Return one character for each block of a text: "x" if the block can hit on the host, otherwise "."."""
        index = self.core.state.pool.index
        return "".join("x" if key in index else "." for key in keys_of(text, self.groups[group]))

    @property
    def pool(self) -> SlotPool:
        return self.core.state.pool

    def count(self, state: SlotState) -> int:
        return self.pool.count(state)

    def eviction_order(self) -> list[BlockKey]:
        return [self.pool.key(slot) or GARBAGE for slot in self.pool.order]

    def device_hit(self, request: Req) -> int:
        """Return the longest prefix on the device, by checking every length."""
        step = self.shape.alignment
        for length in range((len(request.text) - 1) // step * step, 0, -step):
            if all(
                key_of(request.text, group, position) in self.device.index
                for group in self.groups
                for position in needed_blocks(group, length)
            ):
                return length
        return 0

    # -- inside -------------------------------------------------------------------------------------------------

    def _admission(
        self, group: GroupSpec, request: Req, device: int, seen: int, end: int
    ) -> list[DeviceBlockId | None]:
        size = group.block_tokens
        first = group.first_needed_token(seen) // size
        table: list[DeviceBlockId | None] = []
        if group.kind is AttentionKind.RECURRENT:
            end = seen
        for position in range(-(-end // size)):
            if position < first:
                table.append(NULL_BLOCK)
            elif position < device // size:
                found = self.device.block_of(key_of(request.text, group, position))
                assert found is not None
                table.append(found)
            else:
                table.append(None)
        return table

    def _grow(self, request: Req, end: int) -> tuple[tuple[DeviceBlockId, ...], ...] | None:
        """Free blocks that have left the window, then allocate blocks for the tokens up to `end`."""
        for group, table in zip(self.groups, request.tables, strict=True):
            first = group.first_needed_token(request.computed) // group.block_tokens
            gone = [place for place in range(min(first, len(table))) if table[place] != NULL_BLOCK]
            self.device.unhold([table[place] for place in reversed(gone)])
            for place in gone:
                table[place] = NULL_BLOCK
        self._skip_to_end(request, end)
        missing = [
            max(-(-end // group.block_tokens) - len(table), 0)
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        if sum(missing) > len(self.device.free):
            return None
        new = [self.device.hand_out(count) for count in missing]
        for table, blocks in zip(request.tables, new, strict=True):
            table += blocks
        return tuple(map(tuple, new))

    def _skip_to_end(self, request: Req, end: int) -> None:
        """Skip to the block in which the chunk ends, the only block that a recurrent group needs."""
        for group, table in zip(self.groups, request.tables, strict=True):
            if group.kind is AttentionKind.RECURRENT:
                table += [NULL_BLOCK] * ((end - 1) // group.block_tokens - len(table))

    def _states(self, request: Req, end: int) -> Iterator[facts.StateHandedOff]:
        """Yield the states that a chunk's forward pass will write. Their keys are known before the forward pass."""
        for group, table in zip(self.groups, request.tables, strict=True):
            at = end // group.block_tokens - 1
            is_kept = self.states_end is None or end in self.states_end
            if group.kind is not AttentionKind.RECURRENT or end % group.block_tokens or not is_kept:
                continue
            key = key_at(request.text, end, group.group)
            if table[at] not in self.device.keys:
                self.device.name(table[at], key)
            yield facts.StateHandedOff(request.name, group.group, at, key, table[at])

    def _tails(self, request: Req) -> Iterator[tuple[facts.DeviceCopy, facts.TailHandedOff]]:
        """Copy the states after the request's last hash, if it has computed just these tokens, and yield them."""
        tokens = request.computed
        is_last = tokens in self.ends_of_hashes(request.prompt[:-1])[-1:]
        if not is_last or not tokens % self.shape.alignment or len(self.device.free) < len(self.groups):
            return
        for group, table in zip(self.groups, request.tables, strict=True):
            key, block = key_at(request.text, tokens, group.group), table[-1]
            if group.kind is not AttentionKind.RECURRENT:
                self.device.name(block, key)
                continue
            (target,) = self.device.hand_out(1)
            self.device.name(target, key)
            self.device_age[target] = self.device_age[block]
            for held in self.device.bytes:
                held[target] = held[block]
            handed = facts.TailHandedOff(request.name, group.group, tokens, key, target)
            yield facts.DeviceCopy(block, target), handed

    def _compute(self, request: Req, end: int) -> None:
        """Run the forward pass: check the blocks that the tokens read, and write the blocks of [computed, end)."""
        start, text = request.computed, request.text
        age = self.resets
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.block_tokens
            for position in range(group.first_needed_token(start) // size, -(-start // size)):
                want = key_at(text, min((position + 1) * size, start), group.group)
                age = min(age, self.device_age[table[position]])
                for held in self.device.contents(table[position]):
                    assert holds(held, want, self.shape), f"{request.name} reads {held!r}, not {want!r}"
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.block_tokens
            first = (end - 1) // size if group.kind is AttentionKind.RECURRENT else start // size
            for position in range(first, -(-end // size)):
                block, key = table[position], key_at(text, min((position + 1) * size, end), group.group)
                has_older = position * size < start
                self.device_age[block] = min(age, self.device_age[block]) if has_older else age
                for each in self.device.bytes:
                    each[block] = key
        request.computed = end
        self._name_blocks(request, states=False)
        if end == len(text):
            request.text += "."

    def _name_blocks(self, request: Req, *, states: bool) -> None:
        """Give computed and loaded blocks their keys; with `states`, also blocks of recurrent states."""
        for group, table in zip(self.groups, request.tables, strict=True):
            if group.kind is AttentionKind.RECURRENT and not states:
                continue
            for position in range(request.computed // group.block_tokens):
                named = self.device.keys.get(table[position])
                is_whole = named is not None and not (len(named) - 4) % group.block_tokens
                if table[position] != NULL_BLOCK and not is_whole:
                    self.device.name(table[position], key_of(request.text, group, position))

    def _new_keys(self, request: Req) -> tuple[tuple[BlockKey, ...], ...]:
        known = [keys_of(request.text, group) for group in self.groups]
        reported, request.reported_keys = request.reported_keys, list(map(len, known))
        return tuple(tuple(keys[old:]) for keys, old in zip(known, reported, strict=True))

    def _move_bytes(self, rank: int, job: DeviceJob, outcome: CopyOutcome, corrupt: tuple[int, ...]) -> None:
        device, host = self.device.bytes[rank], self.host[rank]
        for place, (slot, block) in enumerate(zip(job.slots, job.targets, strict=True)):
            assert self.device.leased[block], f"a copy touches block {block}, which is not leased"
            is_bad = outcome is FAILED or place in corrupt
            if job.direction is Direction.STORE:
                host[slot] = GARBAGE if is_bad else device[block]
                self.host_age[slot] = self.device_age[block]
                self.rotten.discard((rank, slot))
            else:
                device[block] = GARBAGE if is_bad else host[slot]
                self.device_age[block] = self.host_age[slot]

    def _loads_ended(self, results: LoadResults) -> None:
        for name in (*results.loaded, *results.failed):
            self._load_ended(name, loaded=name in results.loaded)

    def _load_ended(self, name: str, *, loaded: bool) -> None:
        """Handle the end of a load. Check that the end is reported exactly once, even for requests that have ended."""
        request = self.requests[name]
        assert request.state == "loading" or (request.state == "ended" and request.tables), name
        self.results.append((name, loaded))
        if request.state == "ended":
            del self.requests[name]
            self.device.unhold(request.held())
        elif loaded:
            request.state, request.computed = "running", sum(request.brought)
            self._check_loaded(request)
            self._name_blocks(request, states=True)
        else:
            self.device.unhold(request.held())
            request.tables, request.state, request.computed = [], "waiting", 0

    def _check_loaded(self, request: Req) -> None:
        for group, table in zip(self.groups, request.tables, strict=True):
            for position in range(
                needed_blocks(group, request.computed).start, -(-request.computed // group.block_tokens)
            ):
                end = min((position + 1) * group.block_tokens, request.computed)
                want = key_at(request.text, end, group.group)
                for held in self.device.contents(table[position]):
                    assert holds(held, want, self.shape), f"{request.name} was served {held!r}"


def cached(*groups: GroupSpec, text: str = TEXT, **options: Any) -> World:  # noqa: ANN401  # the world's own
    """Return a world with a text on the host but not on the device."""
    world = World(*groups, **options)
    world.only_on_host(text)
    return world
