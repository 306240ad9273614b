"""Engines that share a real store: the same tokens, each other's prefixes, and nothing of before a reset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvoffload.engine import Engine, SamplingParams
from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.transfer import Direction
from kvoffload.runtime import remote_index
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.telemetry.labels import TierState
from kvoffload_reference.plugin import ReferencePlugin
from tests.engine.tiny import assert_same, taken
from tests.reference.rig import BLOCK, TOLERANCE, config_of, plain, text
from tests.remote.servers import Mooncake

PROMPT = text(1, 10 * BLOCK)
NEW_TOKENS = 4
PATIENCE_S = 30.0


class Served:
    """A real engine with the plugin, on real threads, beside a real store."""

    def __init__(self, url: str, kind: str = "full", *, ranks: int = 1, **extra: object) -> None:
        self.kind = kind
        self.plugin = ReferencePlugin()
        settings = {"remote_url": url, "remote_timeout_s": 5.0, **extra}
        config = config_of(kind, ranks=ranks, host_blocks=400, extra=settings)
        self.engine = Engine(config, self.plugin, clock=time.monotonic)
        self.copies: list[TierCopyEnded] = []
        self.offload.bus.count(TierCopyEnded, self.copies.append)

    @property
    def offload(self) -> SchedulerSide:
        assert self.plugin.offload is not None
        return self.plugin.offload

    @property
    def namespace(self) -> str:
        state = self.offload.core.state.remote
        assert state is not None
        return state.namespace

    def step_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until
            self.engine.step()

    def opened(self) -> Served:
        state = self.offload.core.state.remote
        assert state is not None
        self.step_until(lambda: state.is_usable)
        return self

    def run(self, prompt: Sequence[int] = PROMPT) -> None:
        """Serve one request that finds nothing on the device."""
        assert self.engine.pool.reset_prefix_cache()
        stream = self.engine.submit(prompt, SamplingParams(NEW_TOKENS))
        while self.engine.has_work:
            self.engine.step()
        assert_same(taken(stream), plain(self.kind, tuple(prompt), NEW_TOKENS), TOLERANCE)
        assert self.offload.audit() == []

    def share(self) -> None:
        self.run()
        self.run()
        self.step_until(lambda: self.copied(Direction.STORE) > 0)

    def copied(self, way: Direction, outcome: TierOutcome = TierOutcome.DONE) -> int:
        return sum(each.blocks for each in self.copies if (each.direction, each.outcome) == (way, outcome))


StartEngine = Callable[..., Served]


@pytest.fixture
def start() -> Iterator[StartEngine]:
    with ExitStack() as running:

        def begin(url: str, kind: str = "full", **settings: object) -> Served:
            made = Served(url, kind, **settings)  # type: ignore[arg-type]
            running.callback(made.engine.close)
            return made

        yield begin


@pytest.mark.parametrize(("kind", "ranks"), [("full", 2), ("sliding_window", 1)])
def test_r18_the_second_engine_finds_what_the_first_has_written(
    start: StartEngine, url: str, kind: str, ranks: int
) -> None:
    identity = f"{url} {kind}"
    first = start(url, kind, ranks=ranks, disk_identity=identity).opened()
    first.share()
    second = start(url, kind, ranks=ranks, disk_identity=identity).opened()
    assert second.namespace == first.namespace
    second.run()
    assert second.copied(Direction.LOAD) > 0
    assert second.offload.gauges().remote is TierState.OPEN
    counted = second.offload.counters.snapshot()
    assert counted.count("kvoffload_tier_blocks_total", "remote", "load", "done") == second.copied(
        Direction.LOAD
    )
    assert counted.count("kvoffload_transfer_bytes_total", "remote", "load") > 0
    assert counted.count("kvoffload_transfer_bytes_total", "disk", "load") == 0
    assert counted.count("kvoffload_fetched_tokens_total", "remote") > 0
    assert counted.count("kvoffload_fetched_tokens_total", "disk") == 0
    assert counted.distributions["kvoffload_first_token_seconds"][("remote",)].samples == 1
    assert counted.count("kvoffload_load_blocks_total", "loaded") > 0


def test_r18_other_weights_other_ranks_and_before_a_reset_find_nothing(start: StartEngine, url: str) -> None:
    first = start(url, disk_identity="reset").opened()
    first.share()
    for other in (start(url, disk_identity="other"), start(url, ranks=2, disk_identity="reset")):
        other.opened().run()
        assert other.copied(Direction.LOAD) == 0
    was = first.namespace
    assert first.offload.reset()
    assert first.namespace == ""
    first.opened()
    assert first.namespace != was
    first.run()
    late = start(url, disk_identity="reset").opened()  # the next life of the first, as far as anyone can tell
    assert late.namespace not in (was, first.namespace)
    late.run()
    assert (first.copied(Direction.LOAD), late.copied(Direction.LOAD)) == (0, 0)


def test_an_engine_that_was_not_reset_follows_the_generation(
    start: StartEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_index, "LOOK_PERIOD_S", 0.01)
    first, second = (start(url, disk_identity="follow").opened() for _ in range(2))
    was = second.namespace
    first.offload.reset()
    second.step_until(lambda: second.namespace not in ("", was))
    third = start(url, disk_identity="follow").opened()
    assert third.namespace == second.namespace


@pytest.mark.parametrize("what", ["node", "master"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_r17_a_dead_store_costs_its_hits_and_nothing_else(
    start: StartEngine, tmp_path: Path, what: str, how: str
) -> None:
    server = Mooncake(tmp_path)
    try:
        first = start(server.url, remote_timeout_s=0.5).opened()
        first.share()
        second = start(server.url, remote_timeout_s=0.5).opened()
        getattr(getattr(server, what), how)()
        began = time.monotonic()
        second.run()
        assert second.copied(Direction.LOAD) == 0
        assert time.monotonic() - began < PATIENCE_S  # the client alone takes up to a minute for each call
        second.run(text(2, 10 * BLOCK))
        if (what, how) == ("master", "stop"):
            second.step_until(lambda: second.offload.gauges().remote is TierState.FAILING)
        assert second.offload.reset()
        second.engine.close()
    finally:
        server.close()
