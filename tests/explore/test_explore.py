from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import pytest
from msgspec import structs

from kvoffload.core.block_tables import BlockTables
from kvoffload.core.jobs import InFlight, Job, Leases, Spill
from kvoffload.core.loads import Loads, PendingHits
from kvoffload.core.request import Requests
from kvoffload.core.slots import SlotPool
from kvoffload.core.stores import Stores
from kvoffload.core.tier_copies import Fetches, LowerTiers, Spills, _Copies
from kvoffload.core.tiers import DiskTier, RemoteTier
from tests.core.world import DONE
from tests.explore.programs import Action, act, actions, replay
from tests.explore.report import as_test
from tests.explore.scene import Scene
from tests.explore.search import explore
from tests.explore.worlds import WORLDS

BOUND = 250


@pytest.mark.parametrize("name", WORLDS)
def test_no_rule_is_broken_in_any_state(name: str) -> None:
    seen = explore(WORLDS[name], states=BOUND)
    assert seen.violation is None, as_test(name, seen.violation)
    assert seen.states >= BOUND
    assert seen.ends


def test_a_world_is_explored_to_its_last_state() -> None:
    world = WORLDS["one request"]
    small = type(world)(texts={"a": "abcde"}, host=1)
    seen = explore(small, states=100_000)
    assert seen.is_exhausted
    assert seen.violation is None
    assert explore(small, states=100_000) == seen


# -- that it bites ----------------------------------------------------------------------------------------------

_FETCHED = Fetches.reported
_SPILLED = Spills.ended


def _spilled_without_a_hang(self: Spills, job: Spill) -> None:
    job.stuck.clear()
    _SPILLED(self, job)


BREAKS: dict[str, tuple[str, type, str, object]] = {
    "R1 a hit is not pinned until it is consumed": (
        "loads and evictions",
        SlotPool,
        "unpin",
        lambda self, slots: self._pins.clear(),
    ),
    "R1 a hit is forgotten": ("a load", PendingHits, "take", lambda self, record: None),
    "R3 a block in flight is not known to be": (
        "two requests",
        InFlight,
        "began",
        lambda self, keys, job, blocks=(): None,
    ),
    "R4 one rank's report is enough": (
        "two ranks",
        Job,
        "reported",
        lambda self, *_: bool(self.waiting) and not self.waiting.clear(),
    ),
    "R5 a lease is not released": ("one request", Leases, "release", lambda self, blocks: None),
    "R7 ids allocated again are not zeroed": (
        "window",
        BlockTables,
        "reallocated",
        lambda self, blocks: 0,
    ),
    "R4 a block is put into the index when one rank has written it": (
        "spills on two ranks",
        Job,
        "reported",
        lambda self, *_: bool(self.waiting) and not self.waiting.clear(),
    ),
    "R17 a place is written while the index names it": (
        "a spill over another",
        DiskTier,
        "invalidate",
        lambda self, slot: self.has_block.__setitem__(slot, 0),
    ),
    "R16 a place under a write that hangs is allocated": (
        "spills",
        Spills,
        "ended",
        _spilled_without_a_hang,
    ),
    "R10 a spill or a fetch survives a reset": ("spills", _Copies, "failed", lambda self, job, why: None),
    "R14 a key is fetched for each request": (
        "sharing a fetch",
        InFlight,
        "began",
        lambda self, keys, job: None,
    ),
    "R17 what the store does not have counts as fetched": (
        "sharing a fetch from the store",
        Fetches,
        "reported",
        lambda self, job, rank, part: _FETCHED(
            self, job, rank, structs.replace(part, outcome=DONE, missing=())
        ),
    ),
    "R17 a store that does not answer is used": (
        "a store that is lost",
        RemoteTier,
        "is_usable",
        property(lambda self: self.is_open),
    ),
    "R18 what is known of one generation is looked for in the next": (
        "a store that is lost",
        RemoteTier,
        "forget_all",
        lambda self: 0,
    ),
    "R14 a lookup waits for an answer that has come": (
        "puts",
        LowerTiers,
        "remote_answered",
        lambda self, fact: self._state.remote.note(fact.found, fact.missing),
    ),
    "R9 a load is never answered": ("a load", Loads, "_answer", lambda self, *_, **__: None),
    "R10 a store in flight survives a reset": (
        "one request",
        Stores,
        "failed",
        lambda self, job, why: None,
    ),
    "R14 each request loads for itself": (
        "sharing a load",
        Requests,
        "loader",
        lambda self, slots: None,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_rule_is_found_with_a_program_that_shows_it(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, owner, method, wrong = BREAKS[broken]
    monkeypatch.setattr(owner, method, wrong, raising=False)
    violation = explore(WORLDS[name], states=3_000).violation
    assert violation is not None
    namespace: dict[str, Callable[[], None]] = {}
    exec(as_test(name, violation), namespace)
    (test,) = (value for key, value in namespace.items() if key.startswith("test_"))
    with pytest.raises(Exception, match=re.escape(violation.problem.partition(": ")[2]) or None):
        test()
    monkeypatch.undo()
    test()


def test_the_program_is_a_shortest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "release", lambda self, blocks: None)
    violation = explore(WORLDS["one request"], states=3_000).violation
    assert violation is not None
    program = violation.program
    for left_out in range(len(program)):
        _ends_differently([*program[:left_out], *program[left_out + 1 :]])


def _ends_differently(program: list[Action]) -> None:
    """Check that no shorter program breaks a rule."""
    scene = Scene.first(WORLDS["one request"])
    for action in program:
        if action in actions(scene):
            act(scene, action)


# -- that states which look the same are the same ---------------------------------------------------------------


def test_a_pickled_scene_goes_on_like_the_first() -> None:
    scene = Scene.first(WORLDS["sharing a load"])
    for _ in range(12):
        duplicate: Scene = pickle.loads(pickle.dumps(scene))
        assert duplicate.digest() == scene.digest()
        choices = list(actions(scene))
        assert list(actions(duplicate)) == choices
        act(scene, choices[-1])
        act(duplicate, choices[-1])


def test_the_order_of_what_does_not_matter_does_not_show() -> None:
    kind = WORLDS["two requests"]
    one = replay(Scene.first(kind), [("add", "a"), ("lookup", "a", "patient"), ("end", "a")])
    other = replay(Scene.first(kind), [("add", "a"), ("end", "a")])
    assert one.digest() == other.digest()
    assert Scene.first(kind).digest() != one.digest()
