"""Engines that share a real remote tier: one engine in this process, or several engines in separate processes."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.wire import Direction, Tier
from tests.core.audit import audit_side
from tests.vllm.engine_rig import Asked, Reported, Rig, offloading, plain
from tests.vllm.stock import checkpoints

HOST_BLOCKS = 80
_PATIENCE_S = 600.0
_DONE = TierOutcome.DONE
# Outcomes without an error. An abort cancels its copies.
_IN_ORDER = (Tier.REMOTE, _DONE), (Tier.REMOTE, TierOutcome.CANCELLED)


@dataclass
class Sharing:
    rig: Rig
    copies: list[TierCopyEnded]

    def copied(self, direction: Direction) -> int:
        assert all((copy.tier, copy.outcome) in _IN_ORDER for copy in self.copies), self.copies
        return sum(
            copy.blocks for copy in self.copies if (copy.direction, copy.outcome) == (direction, _DONE)
        )

    def ask(self, name: str, asked: Asked, **options: Any) -> Reported:
        assert self.rig.scheduler.reset_prefix_cache()
        self.rig.ask(name, asked, **options)
        self.rig.finish()
        return self.rig.reported[name]

    @property
    def remote(self) -> Any:
        return self.rig.side.core.state.remote

    def wait_until_usable(self) -> None:
        """Step until each rank is connected to the remote tier and has host memory. Before that, nothing can be
        fetched.
        """
        while not (self.remote.is_usable and self.rig.side.gauges()["kvoffload_capacity_slots"]["host",]):
            self.rig.run({"first": Asked((1, 2, 3), 1)})


@contextmanager
def sharing(
    model: Path, folder: Path, url: str, workers: int = 1, kind: checkpoints.Kind = "qwen3", **options: Any
) -> Iterator[Sharing]:
    """Run an engine with a remote tier and without a disk during the `with` block.

    The engine's process counts as started now, because weights that are newer than the process are refused.
    """
    # Ranks spin while they wait for each other. With four ranks on two cores, one call took 16 s.
    extra = {
        "remote_url": url,
        "remote_min_hits": 1,
        "remote_timeout_s": 10.0 if workers == 1 else 60.0,
    }
    if workers > 1:
        options["tensor_parallel_size"] = workers
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)
        patched.setattr("vllm.envs.VLLM_CACHE_ROOT", str(folder), raising=False)
        patched.setattr("kvoffload.remote.bucket.LOOK_PERIOD_S", 0.0)
        with offloading(kind, folder, HOST_BLOCKS, extra=extra, checkpoint=model, **options) as rig:
            copies: list[TierCopyEnded] = []
            rig.side.bus.count(TierCopyEnded, copies.append)
            made = Sharing(rig, copies)
            made.wait_until_usable()
            yield made


class _Host:
    """The commands of `Apart`. They run in the separate process, which runs one engine after another."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._rig: Rig | None = None
        self._sharing: Sharing | None = None

    def start(
        self, model: Path, folder: Path, url: str | None, workers: int = 1, kind: checkpoints.Kind = "qwen3"
    ) -> str:
        """Start an engine, without a connector if `url` is None. Return the engine's namespace in the remote tier."""
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if workers == 2 else "0"
        if url is None:
            self._rig = self._running.enter_context(plain(kind, folder))
            return ""
        self._sharing = self._running.enter_context(sharing(model, folder, url, workers, kind))
        self._rig = self._sharing.rig
        return str(self._sharing.remote.namespace)

    def ask(self, asked: Mapping[str, Asked], abort_after: int | None = None) -> dict[str, Reported]:
        """Empty the device's cache, and serve all prompts concurrently. Return the answers.

        If `abort_after` is given, abort all requests after this many steps.
        """
        assert self._rig is not None
        assert self._rig.scheduler.reset_prefix_cache()

        def step(number: int) -> None:
            if number == abort_after:
                assert self._rig is not None
                self._rig.abort(*asked)

        return self._rig.run(asked, step)

    def copied(self, direction: Direction) -> int:
        assert self._sharing is not None
        return self._sharing.copied(direction)

    def reset(self) -> str:
        assert self._sharing is not None
        self._sharing.rig.forget()
        self._sharing.wait_until_usable()
        return str(self._sharing.remote.namespace)

    def check(self) -> None:
        """Check that no block is in use and that all invariants hold, also on a worker in this process."""
        assert self._sharing is not None
        rig = self._sharing.rig
        rig.finish()
        assert audit_side(rig.side) == []
        if rig.llm.llm_engine.vllm_config.parallel_config.world_size == 1:
            rig.check_clean()

    def stop(self) -> None:
        self._running.close()


def _serve(line: Connection) -> None:
    host = _Host()
    while True:
        name, arguments = line.recv()
        try:
            line.send((getattr(host, name)(*arguments), None))
        except Exception as error:  # the test checks the error
            line.send((None, "".join(traceback.format_exception(error))))


class Apart:
    """An engine in a separate process. Several engines can run commands at the same time."""

    def __init__(self) -> None:
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()

    def begin(self, name: str, *arguments: object) -> None:
        """Call a method of `_Host` in the engine's process. Do not wait for the result."""
        self._line.send((name, arguments))

    def end(self) -> Any:
        """Wait for the oldest call, and return its result."""
        assert self._line.poll(_PATIENCE_S), "the engine does not answer"
        answer, error = self._line.recv()
        assert error is None, error
        return answer

    def do(self, name: str, *arguments: object) -> Any:
        self.begin(name, *arguments)
        return self.end()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def replace(self) -> None:
        """Kill the process, even during a call, and start a new one."""
        self.kill()
        self._spawn()


@contextmanager
def apart(count: int) -> Iterator[list[Apart]]:
    made = [Apart() for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.kill()
