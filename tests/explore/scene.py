"""One state of an exploration. Equal states have equal bytes when pickled."""

from __future__ import annotations

import copyreg
import marshal
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from kvoffload.core.key_index import KeyIndex
from kvoffload.core.machine import SlotState
from kvoffload.core.state import Policy
from kvoffload.core.tally import MissMemory
from kvoffload.model.causes import MissCause
from kvoffload.model.engine import EngineShape
from kvoffload.model.ids import BlockKey, JobId, RequestId, SlotId
from kvoffload.model.wire import Tier
from tests.core.disk_world import DiskWorld
from tests.core.fingerprint import fingerprint
from tests.core.remote_world import RemoteWorld
from tests.core.world import Copy, World
from tests.explore.worlds import SmallWorld

_CONSTANT = frozenset((EngineShape, Policy, SmallWorld))


@dataclass
class Scene:
    """A world between two actions."""

    kind: SmallWorld
    world: World  # the engine, its ranks and the core
    unseen: list[str]  # requests that have not arrived yet
    left: dict[str, int]  # how often each kind of fault may still happen
    # Each request's last lookup answer (tokens on the device and on the host), until the allocation.
    found: dict[str, tuple[int, int]] = field(default_factory=dict)
    # How often each incarnation of a request stored a key; R8 allows two times.
    stored: Counter[tuple[RequestId, int, BlockKey]] = field(default_factory=Counter)
    # Host slots under an abandoned store or fetch, or under a hanging read. They are never allocated
    # again (R16).
    abandoned: set[SlotId] = field(default_factory=set)
    # Disk slots under a hanging or abandoned write.
    places_abandoned: set[SlotId] = field(default_factory=set)

    @classmethod
    def first(cls, kind: SmallWorld) -> Scene:
        scene = cls(kind, kind.build(), list(kind.texts), dict(kind.often))
        # `act` runs the checks after the whole action, which may dispatch several facts.
        scene.world.checks_each_fact = False
        scene.tidy()
        return scene

    @property
    def disk_world(self) -> DiskWorld | None:
        return self.world if isinstance(self.world, DiskWorld) else None

    @property
    def remote_world(self) -> RemoteWorld | None:
        return self.world if isinstance(self.world, RemoteWorld) else None

    def restart(self, *, loses_tail: bool) -> None:
        """Kill the engine with its requests, and start the next engine. All requests arrive again."""
        self.world = self.kind.restarted(self.world, loses_tail=loses_tail)
        self.world.checks_each_fact = False
        self.unseen = list(self.kind.texts)
        self.found.clear()
        self.stored.clear()
        self.abandoned.clear()
        self.places_abandoned.clear()

    def tidy(self) -> None:
        """Drop state that no later action can observe, so that equal behaviour means equal states.

        The dropped state consists of past events, the number of steps, the numbers of jobs (but not their
        order), and bytes that no engine may read.
        """
        world = self.world
        world.log.clear()
        world.results.clear()
        world.last_reports.clear()
        world.steps = 0
        _forget_steps(world)
        _forget_counts(world)
        _renumber_jobs(world)
        _forget_bytes(world)
        if self.disk_world is not None:
            _forget_places(self.disk_world)
        if self.remote_world is not None:
            _forget_values(self.remote_world)

    def digest(self) -> bytes:
        # Only the lazy policy bases decisions on the reason for a miss.
        constant = _CONSTANT if self.kind.policy == "lazy" else _CONSTANT | {MissMemory}
        picture = fingerprint(self, constant=constant)
        return blake2b(marshal.dumps(picture, 2), digest_size=16).digest()  # type: ignore[arg-type]  # atoms, tuples


def _saved(index: KeyIndex) -> tuple[Any, ...]:
    """Save each dict of `parts` once, though many entries share it. Copies would fill most of a scene."""
    runs = [list(same) for _, same in groupby(index.parts, id)]
    return _restored, ([(len(run), run[0]) for run in runs], index._changes)


def _restored(
    runs: list[tuple[int, dict[BlockKey, SlotId]]], changes: list[tuple[BlockKey, bool]]
) -> KeyIndex:
    index = KeyIndex()
    index._changes = changes
    index._all = [part for _, part in runs]
    index.parts = [part for width, part in runs for _ in range(width)]
    return index


copyreg.pickle(KeyIndex, _saved)


def _saved_causes(misses: MissMemory) -> tuple[Any, ...]:
    """Save only the dicts that have causes. The empty ones would be a third of a scene."""
    causes = {number: part for number, part in enumerate(misses._causes) if part}
    return _restored_causes, (causes, misses._before_reset)


def _restored_causes(
    causes: dict[int, OrderedDict[BlockKey, MissCause]], before_reset: Mapping[BlockKey, object]
) -> MissMemory:
    misses = MissMemory()
    for number, part in causes.items():
        misses._causes[number] = part
    misses._before_reset = before_reset
    return misses


copyreg.pickle(MissMemory, _saved_causes)


def _forget_steps(world: World) -> None:
    """Keep only the number of steps since the last spill, and only if another spill may follow."""
    state, lower_tiers = world.core.state, world.core.lower_tiers
    if state.tiers:
        lower_tiers._spilled_at = lower_tiers._spilled_at - state.steps if state.degraded is None else 0
    state.steps = 0


def _forget_counts(world: World) -> None:
    """Keep only whether the host has lost or got blocks since a lookup."""
    state = world.core.state
    pool, is_one = state.pool, state.shape.is_one_full_group
    for record in state.requests.live.values():
        if (hit := record.hit) is not None:
            losses = 0 if hit.losses == pool.losses else -1
            record.hit = hit._replace(losses=losses, fills=0 if is_one or hit.fills == pool.fills else -1)
    for each in (pool, *[tier.pool for tier in state.tiers]):
        each.losses = each.fills = 0


def _renumber_jobs(world: World) -> None:
    state = world.core.state
    jobs = state.jobs
    numbers = {job: JobId(number) for number, job in enumerate(jobs.open)}
    for record in (*state.requests.live.values(), *state.requests.finishing):
        if record.awaits_fetch is not None:  # For the core, an ended fetch is the same as no fetch.
            job, tokens = record.awaits_fetch
            record.awaits_fetch = (numbers[job], tokens) if job in numbers else None
        if record.rest is not None:
            record.rest.job = numbers[record.rest.job]
            record.rest.load = JobId(-1)  # only an event names it
    if jobs.last == len(numbers) - 1:
        return
    for each in jobs.open.values():
        each.id = numbers[each.id]
    jobs.open = {job.id: job for job in jobs.open.values()}
    jobs.last = JobId(len(numbers) - 1)
    world.copies = {
        numbers[number]: Copy(replace(copy.job, id=numbers[number]), copy.running)
        for number, copy in world.copies.items()
    }


def _forget_bytes(world: World) -> None:
    pool, device = world.core.state.pool, world.device
    for slot in range(pool.capacity):
        if pool.state(SlotId(slot)) is SlotState.EMPTY:
            world.host_age.pop(SlotId(slot), None)
            for held in world.host:
                held.pop(SlotId(slot), None)
    for block in device.free:
        if block not in device.keys:
            world.device_age.pop(block, None)
            for rank_bytes in device.bytes:
                rank_bytes.pop(block, None)


def _forget_places(world: DiskWorld) -> None:
    """Drop the bytes of disk slots that neither the pool nor the next process's index can find."""
    jobs = [copy.job for copy in world.copies.values() if copy.job.tier is Tier.DISK]
    copied = {place for job in jobs for place in job.targets}
    found = {*world.index, *world.synced, *copied}
    for place in [place for place in world.place_age if place not in found]:
        del world.place_age[place]
    for held in world.places:
        for place in [place for place in held if place not in found]:
            del held[place]
    world.disk_rotten = {(rank, place) for rank, place in world.disk_rotten if place in world.index}


def _forget_values(world: RemoteWorld) -> None:
    """Drop names of earlier generations, which no engine looks up."""
    jobs = [copy.job.extra for copy in world.copies.values() if copy.job.tier is Tier.REMOTE]
    asked = [ask.namespace for ask in world.asked]
    used = {world.namespace, world.remote.namespace, f"print/{world.resets}", *jobs, *asked}
    for name in [name for name in world.store if name[0] not in used]:
        del world.store[name]
