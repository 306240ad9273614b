"""Engines with a tier below the host: a disk, or a remote tier that engines share.

`living` runs an engine in this process, and `apart` runs several engines in separate processes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.wire import Direction, Tier
from tests.vllm.engine_rig import Asked, Reported, Rig, offloading, plain
from tests.vllm.stock import checkpoints, engines

KINDS: tuple[checkpoints.Kind, ...] = ("qwen3", "gemma3", "lfm2")
HOST_BLOCKS = {"qwen3": 80, "gemma3": 160, "lfm2": 120}
"""All open fetches may fill a quarter of these slots. Any prompt's blocks fit in that quarter, and take one fetch."""
BLOCKS = 6
CACHED = BLOCKS * engines.BLOCK
LOAD, STORE = Direction.LOAD, Direction.STORE
_PATIENCE_S = 600.0


def draw(seed: int, count: int, blocks: int = BLOCKS, tokens: int = 8) -> dict[str, Asked]:
    """Return random prompts with this many whole blocks and some more tokens."""
    chance = random.Random(seed)
    length = blocks * engines.BLOCK + 9
    texts = [tuple(chance.choices(range(256), k=length)) for _ in range(count)]
    return {f"s{seed}n{number}": Asked(text, tokens) for number, text in enumerate(texts)}


PROMPTS, OTHERS = draw(1, 3), draw(2, 16, 10, 1)


@dataclass
class Life:
    """An engine with lower tiers, each of which is open or could not be opened."""

    rig: Rig
    copies: list[TierCopyEnded] = field(default_factory=list)
    restored: int = 0
    """How many blocks of earlier engines were found on the disk at the start."""

    @property
    def disk(self) -> Any:
        return self.rig.side.state.by_name.get(Tier.DISK)

    @property
    def remote(self) -> Any:
        return self.rig.side.state.asked

    def on_disk(self) -> int:
        return len(self.disk.pool.index)

    def copied(self, direction: Direction) -> int:
        """Return how many blocks were copied to or from lower tiers. No copy may have failed."""
        allowed = {TierOutcome.DONE, TierOutcome.CANCELLED}  # an abort cancels its copies
        assert {copy.outcome for copy in self.copies} <= allowed, self.copies
        return sum(
            copy.blocks
            for copy in self.copies
            if (copy.direction, copy.outcome) == (direction, TierOutcome.DONE)
        )

    def wait_until_open(self) -> None:
        """Step until blocks can be fetched from each tier, or until the disk could not be opened.

        An idle engine does not step, so this method also serves requests.
        """

        def is_open() -> bool:
            disk, remote = self.disk, self.remote
            return (
                (disk is None or disk.is_open or disk.is_closed)
                and (remote is None or remote.is_usable)
                and self.rig.side.gauges()["kvoffload_capacity_slots"]["host",] > 0
            )

        while not is_open():
            self.rig.run({"opens": Asked((1, 2, 3), 1)})

    def ask(self, asked: Mapping[str, Asked] = PROMPTS, **options: Any) -> dict[str, Reported]:
        """Serve prompts one after the other; return the answers."""
        for name, one in asked.items():
            self.rig.ask(name, one, **options)
            self.rig.finish()
        return {name: self.rig.reported[name] for name in asked}

    def ask_without_device(self, asked: Mapping[str, Asked] = PROMPTS, **options: Any) -> dict[str, Reported]:
        """Serve prompts one after the other, each with an empty device cache; return the answers."""
        answers: dict[str, Reported] = {}
        for name, one in asked.items():
            assert self.rig.scheduler.reset_prefix_cache()
            answers |= self.ask({name: one}, **options)
        return answers

    def put_on_disk(self) -> None:
        """Serve the prompts until no more of their blocks are written to the disk.

        A block that is still being stored is only spilled in a later round.
        """
        self.ask()
        had = -1
        while self.on_disk() > had:
            had = self.on_disk()
            self.ask()
            self.rig.finish()

    def push_out(self) -> None:
        """Evict all prompts' blocks from device and host. Blocks that were found again are still on the disk."""
        self.rig.run(OTHERS)
        assert self.rig.scheduler.reset_prefix_cache()


@contextmanager
def living(
    kind: checkpoints.Kind,
    folder: Path,
    url: str | None = None,
    *,
    host_blocks: int | None = None,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Life]:
    """Run an engine during the `with` block, with the remote tier at `url`, or by default a disk in `folder`.

    The engine's process counts as started now, because weights that are newer than the process are refused.
    """
    tier: dict[str, Any]
    if url is None:
        tier = {"disk_path": str(folder / "disk"), "disk_bytes": "32MiB"}
    else:
        # Ranks spin while they wait for each other. With four ranks on two cores, one call took 16 s.
        seconds = 10.0 if options.get("tensor_parallel_size", 1) == 1 else 60.0
        tier = {"remote_url": url, "remote_min_hits": 1, "remote_timeout_s": seconds}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)
        patched.setattr("vllm.envs.VLLM_CACHE_ROOT", str(folder), raising=False)
        patched.setattr("kvoffload.remote.bucket.LOOK_PERIOD_S", 0.0)
        slots = host_blocks or HOST_BLOCKS[kind]
        with offloading(kind, folder, slots, extra={**tier, **(extra or {})}, **options) as rig:
            life = Life(rig)
            rig.side.bus.count(TierCopyEnded, life.copies.append)
            life.wait_until_open()
            life.restored = life.on_disk() if life.disk is not None else 0
            yield life


# -- engines in separate processes --------------------------------------------------------------------------------------


class _Host:
    """The commands of `Apart`. They run in the separate process, which runs one engine after another."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._rig: Any = None
        self._life: Any = None

    def start(
        self, model: Path, folder: Path, url: str | None, workers: int = 1, kind: checkpoints.Kind = "qwen3"
    ) -> str:
        """Start an engine, without a connector if `url` is None. Return the engine's namespace in the remote tier."""
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if workers == 2 else "0"
        if url is None:
            self._rig = self._running.enter_context(plain(kind, folder))
            return ""
        ranks: dict[str, Any] = {"tensor_parallel_size": workers} if workers > 1 else {}
        self._life = self._running.enter_context(living(kind, folder, url, checkpoint=model, **ranks))
        self._rig = self._life.rig
        return str(self._life.remote.namespace)

    def ask(self, asked: Mapping[str, Asked], abort_after: int | None = None) -> dict[str, Reported]:
        """Empty the device's cache, and serve all prompts concurrently. Return the answers.

        If `abort_after` is given, abort all requests after this many steps.
        """
        assert self._rig.scheduler.reset_prefix_cache()
        answers: dict[str, Reported] = self._rig.run(
            asked, lambda number: self._rig.abort(*asked) if number == abort_after else None
        )
        return answers

    def copied(self, direction: Direction) -> int:
        return int(self._life.copied(direction))

    def reset(self) -> str:
        self._rig.forget()
        self._life.wait_until_open()
        return str(self._life.remote.namespace)

    def check(self) -> None:
        self._rig.check_clean()

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


def start(all_of: Sequence[Apart], *arguments: object) -> list[str]:
    """Start these engines concurrently; return their namespaces in the remote tier."""
    for engine in all_of:
        engine.begin("start", *arguments)
    return [engine.end() for engine in all_of]


def stop(*all_of: Apart) -> None:
    for engine in all_of:
        engine.do("check")
        engine.do("stop")
