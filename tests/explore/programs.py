"""Lists the actions that are possible in a scene, and runs them.

An action is a tuple of words. A program is a list of actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvoffload.model import facts
from kvoffload.model.ids import JobId, Rank, SlotId
from kvoffload.model.wire import Direction, Tier
from tests.core.disk_world import DiskWorld
from tests.core.remote_world import RemoteWorld, Value
from tests.core.world import CORRUPT, DONE, FAILED, GARBAGE, Copy, Req
from tests.explore import invariants
from tests.explore.scene import Scene

Action = tuple[str | int, ...]

_OUTCOMES = {"done": DONE, "fail": FAILED, "corrupt": CORRUPT, "hang": FAILED}


def actions(scene: Scene) -> Iterator[Action]:
    for name in scene.unseen:
        yield ("add", name)
    if scene.left.get("again"):
        yield from (("again", name) for name in scene.kind.texts if _is_over(scene, name))
    for name, request in scene.world.requests.items():
        yield from _of_request(scene, name, request)
    running = scene.world.running()
    if len(running) > 1:
        yield ("step", *(request.name for request in running))
    yield ("step",)
    yield from _of_copies(scene)
    yield from _of_lower_tiers(scene)
    yield from _troubles(scene, "reset", "forget", "grow", "degrade")
    if scene.left.get("choose"):
        yield from (("choose", policy) for policy in scene.world.core.policies)


def _troubles(scene: Scene, *kinds: str) -> Iterator[Action]:
    yield from ((kind,) for kind in kinds if scene.left.get(kind))


def _is_over(scene: Scene, name: str) -> bool:
    return name not in scene.unseen and name not in scene.world.requests


def _of_request(scene: Scene, name: str, request: Req) -> Iterator[Action]:
    if request.state == "waiting":
        yield from _of_waiting(scene, name, request)
    if request.state == "running":
        yield ("step", name)
        if scene.left.get("preempt"):
            yield ("preempt", name)
    if request.state != "ended":
        yield ("end", name)


def _of_waiting(scene: Scene, name: str, request: Req) -> Iterator[Action]:
    yield ("lookup", name, "patient")
    yield ("lookup", name, "impatient")
    device, host = scene.found.get(name, (-1, 0))
    if device == scene.world.device_hit(request):
        yield ("allocate", name, "all")
        if host:
            yield ("allocate", name, "nothing")
        if host > scene.world.shape.alignment:
            yield ("allocate", name, "less")
    if scene.left.get("violation"):
        yield ("violation", name)


def _of_copies(scene: Scene) -> Iterator[Action]:
    for job, copy in scene.world.copies.items():
        for rank in sorted(copy.running):
            yield from (("report", rank, job, how) for how in _ends(scene, copy))
    if scene.left.get("late"):
        for job in scene.world.submitted():
            yield ("late", job)


def _ends(scene: Scene, copy: Copy) -> Iterator[str]:
    is_store = copy.job.direction is Direction.STORE
    yield "done"
    if scene.left.get("fail"):
        yield "fail"
    if scene.left.get("corrupt") and not (is_store and copy.job.tier is Tier.HOST):
        yield "corrupt"
    if scene.left.get("hang") and copy.job.tier is Tier.DISK:
        yield "hang"
    if scene.left.get("full") and copy.job.tier is Tier.REMOTE and is_store:
        yield "full"


def _of_lower_tiers(scene: Scene) -> Iterator[Action]:
    if scene.disk_world is not None:
        yield from _of_disk(scene, scene.disk_world)
    if scene.remote_world is not None:
        yield from _of_store(scene, scene.remote_world)
    if scene.left.get("restart"):
        yield ("restart", "whole")
        if scene.disk_world is not None and scene.disk_world.synced != scene.disk_world.index:
            yield ("restart", "cut")
    if scene.world.late_writes:
        yield ("late write",)
    if scene.world.withheld:
        yield ("old processes",)


def _of_disk(scene: Scene, world: DiskWorld) -> Iterator[Action]:
    if world.unread:
        yield ("open",)
    for rank in sorted(world.failing[Tier.DISK]):
        yield ("works", rank)
    if scene.left.get("spoil"):
        yield from (("spoil", rank, place) for place in sorted(world.index) for rank in world.ranks)
    yield from _troubles(scene, "close")


def _of_store(scene: Scene, world: RemoteWorld) -> Iterator[Action]:
    for number in range(len(world.asked)):
        yield ("answer", number, "true")
        ends = {"lie": "lies", "mute": "fails"}
        yield from (("answer", number, how) for trouble, how in ends.items() if scene.left.get(trouble))
    if not world.remote.is_usable or world.remote.namespace != world.namespace:
        yield ("reach",)
    for trouble in ("evict", "overwrite"):
        if scene.left.get(trouble):
            yield from ((trouble, number) for number in range(len(world.store)))
    if scene.left.get("lose"):
        yield ("lose",)
        yield from (("lose", rank) for rank in world.ranks)
    yield from _troubles(scene, "empty", "rename")


def act(scene: Scene, action: Action) -> None:
    """Run one action, check every invariant, and tidy up the scene.

    Raises:
        Exception: a rule was broken.
    """
    kind, *words = action
    before = invariants.Before.of(scene)
    if kind not in _FREE:
        scene.left[str(kind)] -= 1
    _ACTS[str(kind)](scene, *words)
    invariants.check(scene, before if kind != "restart" else invariants.Before.of(scene))
    scene.tidy()


def replay(scene: Scene, program: Sequence[Action]) -> Scene:
    for action in program:
        act(scene, action)
    return scene


def _add(scene: Scene, name: str) -> None:
    scene.unseen.remove(name)
    scene.world.add(name, scene.kind.texts[name])


def _again(scene: Scene, name: str) -> None:
    for entry in [entry for entry in scene.stored if entry[0] == name]:
        del scene.stored[entry]
    scene.world.add(name, scene.kind.texts[name])


def _lookup(scene: Scene, name: str, patience: str) -> None:
    world = scene.world
    request = world.requests[name]
    device = world.device_hit(request)
    answer = world.lookup(request, may_wait=patience == "patient")
    invariants.check_lookup(scene, name, answer, is_patient=patience == "patient")
    scene.found.pop(name, None)
    if answer is not None:
        scene.found[name] = (device, answer)


def _allocate(scene: Scene, name: str, how_much: str) -> None:
    _device, answer = scene.found[name]
    less = answer - scene.world.shape.alignment
    external = {"all": answer, "less": less, "nothing": 0}[how_much]
    if scene.world.allocate(scene.world.requests[name], external):
        # After a failed allocation, the engine may look up again or allocate later.
        del scene.found[name]


def _violation(scene: Scene, name: str) -> None:
    """Let the engine expect tokens that the core did not promise, with or without a lookup (R2)."""
    scene.found.pop(name, None)
    request = scene.world.requests[name]
    room = len(request.text) - 1 - scene.world.device_hit(request)
    scene.world.allocate(request, min(scene.world.shape.alignment, max(room, 0)))


def _step(scene: Scene, *names: str) -> None:
    world = scene.world
    known = set(world.copies)
    plan = world.step(*[world.requests[name] for name in names]) if names else world.idle_step()
    invariants.note_plan(scene, plan, known)


def _end(scene: Scene, name: str) -> None:
    scene.found.pop(name, None)
    scene.world.end(scene.world.requests[name])


def _report(scene: Scene, rank: int, job: int, outcome: str) -> None:
    if outcome != "done":
        scene.left[outcome] -= 1
    if outcome == "hang":
        _hang(scene, rank, JobId(job))
    elif outcome == "full":
        _remote(scene).report(rank, JobId(job), takes=len(scene.world.copies[JobId(job)].job.slots) - 1)
    else:
        scene.world.report(rank, JobId(job), _OUTCOMES[outcome], (0,) if outcome == "corrupt" else ())
    invariants.check_repeated(scene, Rank(rank))


def _hang(scene: Scene, rank: int, job: JobId) -> None:
    """Let a call to the disk hang on one rank. The call may still change the slot that it fills."""
    world, copy = _disk(scene), scene.world.copies[job].job
    assert copy.tier is Tier.DISK
    world.failing[Tier.DISK].add(rank)
    world.report(rank, job, FAILED, stuck=(0,))
    if copy.direction is Direction.STORE:
        scene.places_abandoned.add(copy.targets[0])
    else:
        scene.abandoned.add(copy.slots[0])


def _late(scene: Scene, job: int) -> None:
    copy = scene.world.copies[JobId(job)].job
    scene.world.overdue(JobId(job))
    is_store = copy.direction is Direction.STORE
    if copy.tier is Tier.DISK and is_store:
        scene.places_abandoned.update(copy.targets)
    if (copy.tier is Tier.HOST) is is_store:
        scene.abandoned.update(copy.slots)


def _reset(scene: Scene) -> None:
    scene.world.reset()
    invariants.check_reset(scene)


def _disk(scene: Scene) -> DiskWorld:
    assert isinstance(scene.world, DiskWorld)
    return scene.world


def _remote(scene: Scene) -> RemoteWorld:
    assert isinstance(scene.world, RemoteWorld)
    return scene.world


def _answer(scene: Scene, number: int, how: str) -> None:
    if how != "true":
        scene.left["lie" if how == "lies" else "mute"] -= 1
    _remote(scene).answer_one(number, how)


def _reach(scene: Scene) -> None:
    """Report to the scheduler and to all ranks that the store answers."""
    _remote(scene).reach()
    _remote(scene).fails(works=True, tier=Tier.REMOTE)


def _lose(scene: Scene, *ranks: int) -> None:
    """Report to the scheduler, or to these ranks, that the store does not answer."""
    if ranks:
        _remote(scene).fails(*ranks, tier=Tier.REMOTE)
    else:
        scene.world.tell(facts.TierLost(Tier.REMOTE))


def _take(scene: Scene, number: int, value: Value | None = None) -> None:
    """Remove a value from the remote tier or, as another writer could, replace it by `value`."""
    store = _remote(scene).store
    name = sorted(store)[number]
    if value is None:
        del store[name]
    else:
        store[name] = value


def _rename(scene: Scene) -> None:
    """Give the shared store a new generation, which this engine has not read yet."""
    _remote(scene).namespace += " renamed"


_ACTS: dict[str, Callable[..., object]] = {
    "add": _add,
    "again": _again,
    "lookup": _lookup,
    "allocate": _allocate,
    "violation": _violation,
    "step": _step,
    "preempt": lambda scene, name: scene.world.preempt(scene.world.requests[name]),
    "end": _end,
    "report": _report,
    "late": _late,
    "reset": _reset,
    "forget": lambda scene: scene.world.device.forget_keys(),
    "grow": lambda scene: scene.world.ready_up_to(scene.kind.host),
    "degrade": lambda scene: scene.world.degrade(),
    "choose": lambda scene, policy: scene.world.choose(policy),
    "open": lambda scene: scene.world.tell(_disk(scene).unread.pop(0)),
    "works": lambda scene, rank: _disk(scene).fails(rank, works=True),
    "spoil": lambda scene, rank, place: _disk(scene).spoil_place(rank, SlotId(place)),
    "close": lambda scene: scene.world.tell(facts.TierLost(Tier.DISK)),
    "restart": lambda scene, how: scene.restart(loses_tail=how == "cut"),
    "late write": lambda scene: scene.world.late_write(),
    "old processes": lambda scene: scene.world.forget_old_processes(),
    "answer": _answer,
    "reach": _reach,
    "lose": _lose,
    "evict": _take,
    "overwrite": lambda scene, number: _take(scene, number, Value(GARBAGE, 0)),
    "empty": lambda scene: _remote(scene).store.clear(),
    "rename": _rename,
}
_FREE = (
    "add",
    "lookup",
    "allocate",
    "step",
    "end",
    "report",
    "open",
    "works",
    "answer",
    "reach",
    "late write",
    "old processes",
)
"""All other actions are faults, of which a world has a limited number."""
