from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.tier_key import TierKey
from kvoffload.model import facts
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.remote import values
from kvoffload.remote.address import BucketAddress, RemotePlace
from kvoffload.remote.values import generation_name
from kvoffload.runtime import remote_catalog
from kvoffload.runtime.portal import Portal
from kvoffload.runtime.remote_catalog import LOOK_PERIOD_S, RemoteCatalog
from kvoffload.testing import FakeClock
from tests.captured_logs import capture_logs
from tests.gates import ManualExecutor
from tests.remote.fake_store import FakeStore
from tests.runtime.parts import IDENTITY

NAME = generation_name(IDENTITY.fingerprint)


class InlinePortal(Portal):
    def new_executor(self, purpose: str, threads: int = 1) -> ManualExecutor:
        return ManualExecutor(held=False)


class Engine(RemoteCatalog):
    """A catalog that records the facts that it sends to the core."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401
        super().__init__(*args)
        self.reported: list[facts.Fact] = []


class World:
    """One store, and the engines that share it."""

    def __init__(self, key: TierKey | None) -> None:
        self.key = key
        self.clock, self.store = FakeClock(), FakeStore()
        self.engines: list[Engine] = []

    def start(self, identity: Future[KVIdentity] | None = None) -> Engine:
        """Start an engine. Its KV identity is unknown until `identity` has a result."""
        place = RemotePlace(BucketAddress("blocks"), lambda: IDENTITY)
        engine = Engine(place, 1, InlinePortal("inline"), self.clock.monotonic, 2.0, self.key)
        if identity is not None:
            engine._identified = identity
        self.engines.append(engine)
        self.step()
        return engine

    def step(self, seconds: float = 0.0) -> None:
        self.clock.jump(seconds)
        for engine in self.engines:
            for _ in range(3):
                engine.reported += engine.take_facts()


def count(lines: list[dict[str, Any]], event: str) -> int:
    return [line["event"] for line in lines].count(event)


def generation(engine: Engine) -> str:
    """Return the generation that the core uses, or ""."""
    changes = [each for each in engine.reported if not isinstance(each, facts.TierAnswered)]
    if not changes or not isinstance(changes[-1], facts.TierOpened):
        return ""
    return changes[-1].namespace.removeprefix(f"{IDENTITY.fingerprint}/")


@pytest.fixture(params=[TierKey(bytes(32)), None], ids=["key", "no key"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(request.param)
    monkeypatch.setattr(remote_catalog, "open_store", lambda *_: made.store)
    return made


def test_engines_with_one_fingerprint_share_the_first_ones_generation(world: World) -> None:
    first, second = world.start(), world.start()
    assert generation(first) == generation(second)
    assert world.store.values[NAME].startswith(generation(first).encode())
    assert 32 <= len(world.store.values[NAME]) <= 256  # no more bytes are read from a bucket


@pytest.mark.parametrize("error", [DiskError("no weights"), RecursionError("too deep")])
def test_an_engine_without_an_identity_does_not_use_the_store(world: World, error: Exception) -> None:
    unknown: Future[KVIdentity] = Future()
    engine = world.start(unknown)
    assert engine.opening == "identity of the weights"
    with capture_logs() as lines:
        unknown.set_exception(error)
        world.step()
        world.step()
    (line,) = [line for line in lines if line["event"] == "remote_not_opened"]
    assert str(error) in line["reason"]
    assert engine.opening is None


def test_r18_after_a_reset_earlier_and_later_engines_use_separate_generations(world: World) -> None:
    first, second = world.start(), world.start()
    shared = generation(first)
    with capture_logs() as lines:
        assert first.reset()
        world.step(LOOK_PERIOD_S)
    assert count(lines, "remote_generation_kept") == 1
    late, later = world.start(), world.start()
    assert generation(second) == shared
    assert generation(later) == generation(late)
    assert len({shared, generation(first), generation(late)}) == 3
    del world.store.values[NAME]
    world.step(LOOK_PERIOD_S)
    assert generation(second) == shared
    assert len({shared, generation(first), generation(late)}) == 3


def test_r18_a_reset_replaces_the_generation_by_one_of_the_same_length(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on a machine whose clock was never set: a few milliseconds after 1970
    monkeypatch.setattr(time, "time_ns", lambda: 10**7)
    first = world.start()
    before = len(world.store.values[NAME])
    monkeypatch.undo()
    assert first.reset()
    assert len(world.store.values[NAME]) == before  # so Mooncake writes it to the same memory


@pytest.mark.parametrize("is_set", [True, False])
def test_all_engines_share_the_generation_that_replaces_a_lost_one(
    world: World, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    first, second = world.start(), world.start()
    was = generation(first)
    del world.store.values[NAME]
    if not is_set:  # as on a machine whose clock was never set: twelve days after 1970
        monkeypatch.setattr(time, "time_ns", lambda: 10**15)
    world.step(LOOK_PERIOD_S)
    assert generation(first) == generation(second) == generation(world.start()) != was


def test_a_generation_that_has_not_changed_is_logged_once(world: World) -> None:
    with capture_logs() as lines:
        world.start()
        world.step(LOOK_PERIOD_S)
        world.step(LOOK_PERIOD_S)
    assert count(lines, "remote_opened") == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"another writer's", b"0" * 32, b"0" * 31 + b" after a reset", b"0" * 32 + b" after a reset."],
)
def test_an_invalid_generation_is_not_used(world: World, data: bytes) -> None:
    world.store.values[NAME] = data
    assert generation(world.start()) == ""


def test_r18_a_reset_before_the_identity_is_known_counts(world: World) -> None:
    known = Future[KVIdentity]()
    first, second = world.start(), world.start(known)
    assert second.reset()
    known.set_result(IDENTITY)
    world.step()
    assert generation(second) not in ("", generation(first))
    assert generation(world.start()) not in (generation(first), generation(second))


def test_a_reset_that_the_store_refused_is_repeated_when_the_store_works(world: World) -> None:
    first = world.start()
    was, world.store.fails = generation(first), True
    with capture_logs() as lines:
        assert not first.reset()
    assert count(lines, "remote_generation_not_replaced") == 1
    for _ in range(3):
        first.send([(RequestId("asks"), (BlockKey(b"key"),))])
        world.step()
    assert generation(first) == ""  # after three failures in a row, the core stops using the generation
    assert not first.reset()
    world.step()
    assert generation(first) == ""
    world.store.fails = False
    world.step(1.0)
    assert generation(first) not in ("", was)
    assert generation(world.start()) != was
    assert first.reset()


@pytest.mark.parametrize("world", [TierKey(bytes(32))], ids=["key"], indirect=True)
@pytest.mark.parametrize(
    "harm", ["no key", "another key", "another name's", "other time", "not after a reset"]
)
def test_r18_with_a_tier_key_a_forged_generation_is_not_used(world: World, harm: str) -> None:
    first = world.start()
    assert generation(first) != ""
    first.reset()
    genuine = world.store.values[NAME]
    world.store.values[NAME] = {
        "no key": values.new_generation(NAME, None, 0),
        "another key": values.new_generation(NAME, TierKey(b"x" * 32), 0),
        "another name's": values.new_generation(generation_name("other"), world.key, 0),
        "other time": genuine.replace(b" 0", b" 1"),
        "not after a reset": genuine.replace(b" after a reset", b" after a start"),
    }[harm]
    assert world.store.values[NAME] != genuine
    assert generation(world.start()) == ""
    world.store.values[NAME] = genuine
    assert generation(world.start()) != ""


def test_r18_with_a_tier_key_running_engines_refuse_a_restored_older_generation(world: World) -> None:
    first = world.start()
    old, name = world.store.values.pop(NAME), generation(first)
    world.step(LOOK_PERIOD_S)
    newer = generation(first)
    assert newer != name
    world.store.values[NAME] = old
    with capture_logs() as lines:
        world.step(LOOK_PERIOD_S)
        world.step(LOOK_PERIOD_S)
    refused = count(lines, "remote_generation_refused")
    assert (generation(first), refused) == ((name, 0) if world.key is None else (newer, 1))
    assert generation(world.start()) == name  # a new engine cannot detect that the old generation is back
