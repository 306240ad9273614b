"""Runs tiny engines with the real plugin, and the same engines without the plugin for comparison."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvoffload.engine import Engine, EngineConfig, SamplingParams, Token, TokenStream
from kvoffload.model.engine import Promises
from kvoffload.model.ids import Rank
from kvoffload.model.wire import Direction
from kvoffload.telemetry.counters import Snapshot
from kvoffload.testing import FakeClock, GatedCopier, GatedTicket
from kvoffload.transfer.host_file import _HEADER, FileHeader
from kvoffload.transfer.ports import Clocks
from kvoffload_reference.plugin import ReferencePlugin
from tests.conservation import conservation, slot_problems
from tests.core.audit import audit
from tests.engine.tiny import assert_same, taken, tiny_config, tiny_model
from tests.runtime.manual_portal import ManualPortal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvoffload.runtime.scheduler_side import SchedulerSide
    from kvoffload.runtime.worker_side import WorkerSide

BLOCK = 4
KINDS = ("full", "sliding_window", "chunked_local", "recurrent")
# Each group has two layers, so that each of two ranks has one layer of every group.
LAYERS = {"full": 2, "sliding_window": 6, "chunked_local": 6, "recurrent": 6}
PLENTY = 2000
TIMEOUT_S = 5.0
TOLERANCE = 1e-3
STEP_S = 0.02  # in fake seconds; longer than any pause of the pump


def config_of(
    kind: str,
    *,
    ranks: int = 1,
    replicas: int = 1,
    store_policy: str = "eager",
    host_blocks: int = PLENTY,
    timeout_s: float = TIMEOUT_S,
    extra: Mapping[str, object] | None = None,
    **sizes: object,
) -> EngineConfig:
    """Return the configuration of an engine with the plugin. `extra` are further settings of the plugin."""
    stages = ranks // replicas
    plugin_config = {
        "store_policy": store_policy,
        "host_bytes": host_blocks * stages * slot_bytes(kind, stages),
        "transfer_timeout_s": timeout_s,
        **(extra or {}),
    }
    model = {"layers": LAYERS[kind]}
    return tiny_config(
        kind, model=model, ranks=ranks, replicas=replicas, plugin_config=plugin_config, **sizes
    )


def slot_bytes(kind: str, ranks: int = 1) -> int:
    """Return a block's bytes on each rank. Keys and values are float32."""
    model = tiny_model(kind, {"layers": LAYERS[kind]})
    return 2 * BLOCK * model.kv_heads * model.head_dim * 4 * model.layers_per_group // ranks


class Rig:
    """An engine with the plugin. The test steps the engine, and controls time and copies.

    The copies are real. A copy ends as soon as it is submitted, unless the test has called `hold()`.
    """

    def __init__(
        self,
        kind: str = "full",
        *,
        promises: Promises | None = None,
        starts_ready: bool = True,
        **options: Any,  # noqa: ANN401  # those of `config_of`
    ) -> None:
        self.kind = kind
        self.clock = FakeClock()
        self.copiers: list[GatedCopier] = []
        now = self.clock.monotonic
        self.portal = ManualPortal(self.clock)
        self.plugin = ReferencePlugin(
            portal=self.portal,
            clocks=Clocks(now, now, self.clock.sleep),
            clock=self.clock,
            make_copier=self._make_copier,
            promises=promises,
        )
        self.engine = Engine(config_of(kind, **options), self.plugin, clock=now)
        self.streams: list[tuple[tuple[int, ...], int, TokenStream]] = []
        if starts_ready:
            self.portal.advance()
            self.engine.step()  # this step reports the host memory to the scheduler's side

    def _make_copier(self, rank: Rank) -> GatedCopier:
        assert rank == len(self.copiers)
        self.copiers.append(GatedCopier(held=False))
        return self.copiers[-1]

    @property
    def offload(self) -> SchedulerSide:
        assert self.plugin.offload is not None
        return self.plugin.offload

    @property
    def workers(self) -> list[WorkerSide]:
        return self.plugin.workers

    def submit(self, prompt: Sequence[int], new_tokens: int = 4) -> TokenStream:
        stream = self.engine.submit(prompt, SamplingParams(new_tokens))
        self.streams.append((tuple(prompt), new_tokens, stream))
        return stream

    def step(self, seconds: float = STEP_S) -> None:
        """Run one step of the engine, and let the transfer coroutines react to the step."""
        self.engine.step()
        self.pass_time(seconds)
        self.check()

    def pass_time(self, seconds: float = STEP_S) -> None:
        """Advance the fake clock. When this returns, released copies have ended and all tasks wait."""
        self.portal.advance(seconds)

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not drained after {limit} steps: {self.engine.statistics()}")

    def drain_requests(self, limit: int = 300) -> None:
        """Step until no request is open. Copies may still be open."""
        for _ in range(limit):
            if not self.engine._scheduler.has_requests:
                return
            self.step()
        raise AssertionError(f"requests are open after {limit} steps: {self.engine.statistics()}")

    def run_requests(self, *prompts: Sequence[int]) -> None:
        for prompt in prompts:
            self.submit(prompt)
        self.drain_requests()

    def run(self, prompt: Sequence[int], new_tokens: int = 4) -> list[Token]:
        stream = self.submit(prompt, new_tokens)
        self.drain()
        found = taken(stream)
        assert_same(found, plain(self.kind, tuple(prompt), new_tokens), TOLERANCE)
        return found

    def run_plain(self, prompt: Sequence[int], new_tokens: int = 4) -> None:
        """Serve a request as `run` does, but check only its tokens, because offloading is broken."""
        stream = self.submit(prompt, new_tokens)
        for _ in range(100):
            if stream.request_id in self.engine._open:
                self.engine.step()
                self.pass_time()
        assert_same(taken(stream), plain(self.kind, tuple(prompt), new_tokens), TOLERANCE)

    def hold(self) -> None:
        for copier in self.copiers:
            copier.hold()

    def release(self) -> None:
        for copier in self.copiers:
            copier.release()

    def forget_device(self) -> None:
        assert self.engine.pool.reset_prefix_cache()

    # -- invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert self.engine.audit() == []
        assert audit(self.offload.core) == []
        assert conservation(self.counts()) == []
        assert slot_problems(self.offload.gauges()) == []
        for copier in self.copiers:
            assert_exclusive(copier.open_tickets)

    def counts(self) -> Snapshot:
        return self.offload.counters.snapshot()

    def count(self, name: str, *labels: str) -> int:
        return self.counts().count(f"kvoffload_{name}_total", *labels)

    def assert_clean(self, *, lost_blocks: int = 0) -> None:
        """Check that no request or job is open, and that hanging copies keep exactly `lost_blocks` blocks."""
        self.check()
        numbers = self.engine.statistics()
        assert (numbers.waiting, numbers.loading, numbers.running) == (0, 0, 0)
        assert numbers.leased_blocks == lost_blocks
        assert numbers.free_blocks == self.engine.pool.usable_blocks - lost_blocks
        assert conservation(self.counts(), drained=not lost_blocks) == []
        core = self.offload.core.state
        assert core.requests.live == {}
        if not lost_blocks:
            assert core.jobs.open == {}
            assert core.requests.finishing == set()
            assert core.leases.counts == {}
        slots = self.offload.gauges()["kvoffload_slots"]
        assert slots["host", "filling"] == slots["host", "pinned"] == 0 or lost_blocks

    def assert_outputs(self) -> None:
        """Check that each request's tokens, up to an abort, are those of an engine without the plugin."""
        for prompt, new_tokens, stream in self.streams:
            found = taken(stream)
            assert_same(found, plain(self.kind, prompt, new_tokens)[: len(found)], TOLERANCE)

    def close(self) -> None:
        self.engine.close()


def assert_exclusive(tickets: Sequence[GatedTicket]) -> None:
    """Check that no two open copies use the same bytes. Two loads may read the same slot (R3, R5)."""
    spans = sorted(
        (int(start), int(start + size), side == "source" and ticket.direction is Direction.LOAD)
        for ticket in tickets
        for side in ("source", "target")
        for start, size in zip(getattr(ticket.runs, side), ticket.runs.size, strict=True)
    )
    for (_, end, may_share), (start, _, also) in pairwise(spans):
        assert end <= start or (may_share and also), "two copies at a time on the same memory"


@contextmanager
def rig(kind: str = "full", **options: Any) -> Iterator[Rig]:  # noqa: ANN401  # those of `Rig`
    made = Rig(kind, **options)
    try:
        yield made
    finally:
        made.release()
        made.pass_time(2 * TIMEOUT_S)
        made.close()


class Engines:
    """Starts engines, beside each other or one after the other. All have `settings` of the plugin."""

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}
        self._running = dict[int, ExitStack]()

    def start(
        self,
        kind: str = "full",
        *,
        host_blocks: int = 200,
        ranks: int = 1,
        replicas: int = 1,
        starts_ready: bool = True,
        drains: bool = True,
        **extra: object,
    ) -> Rig:
        """Start an engine beside those that run. `extra` are further settings of the plugin."""
        running = ExitStack()
        sizes: dict[str, int] = {"host_blocks": host_blocks, "ranks": ranks, "replicas": replicas}
        made = running.enter_context(
            rig(kind, extra={**self.settings, **extra}, starts_ready=starts_ready, **sizes)
        )
        self._running[id(made)] = running
        if drains:
            made.drain()
        return made

    def next(self, kind: str = "full", **options: Any) -> Rig:  # noqa: ANN401  # those of `start`
        """Stop all engines, and start the next one."""
        self.stop_all()
        return self.start(kind, **options)

    def stop(self, made: Rig) -> None:
        self._running.pop(id(made)).close()

    def stop_all(self) -> None:
        while self._running:
            self._running.popitem()[1].close()


@cache
def _plain_engine(kind: str) -> Engine:
    config = tiny_config(kind, model={"layers": LAYERS[kind]}, num_blocks=4000, step_tokens=128)
    return Engine(config, clock=lambda: 0.0)


@cache
def plain(kind: str, prompt: tuple[int, ...], new_tokens: int) -> list[Token]:
    engine = _plain_engine(kind)
    engine.reset_prefix_cache()
    stream = engine.submit(prompt, SamplingParams(new_tokens))
    while engine.has_work:
        engine.step()
    return taken(stream)


def text(seed: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt. Of two prompts with the same seed, the shorter is a prefix of the longer."""
    return tuple(random.Random(seed).choices(range(64), k=tokens))


def as_original(path: Path) -> None:
    """Give a copied file of host memory the header of an original, because an engine takes no copies."""
    with path.open("r+b") as file:
        header = FileHeader(*_HEADER.unpack(file.read(_HEADER.size))[2:])
        os.pwrite(file.fileno(), header.packed(file.fileno()), 0)


def on_host_only(made: Rig, *prompts: tuple[int, ...]) -> None:
    """Store these prompts on the host, and remove them from the device."""
    for prompt in prompts:
        made.run(prompt, 6)  # enough steps to store all blocks in spite of the lease limit
    made.forget_device()


def open_loads(made: Rig) -> list[GatedTicket]:
    return [ticket for ticket in made.copiers[0].open_tickets if ticket.direction is Direction.LOAD]


def open_stores(made: Rig) -> list[GatedTicket]:
    return [ticket for ticket in made.copiers[0].open_tickets if ticket.direction is Direction.STORE]
