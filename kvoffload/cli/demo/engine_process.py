"""One engine of a demo in a process of its own, so that it can be killed as a crash would, or share nothing but a store.

the demo      Round(number, script) ─▶                        None: end
this process  Ready ─▶   Served, Served, ... ─▶ Played ─▶   Failed, at any time
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvoffload.cli.demo.conversations import Conversation, TurnId
from kvoffload.cli.demo.engines import PLUGIN, engine_config
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Player, Turn, warm_up
from kvoffload.engine import Engine, EngineError
from kvoffload.engine.plugin import load_plugin
from kvoffload.logs import configure
from kvoffload.model.errors import KVOffloadError
from kvoffload.model.transfer import Tier
from kvoffload.telemetry.labels import TierState
from kvoffload.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection

    from kvoffload.runtime.scheduler_side import SchedulerSide

_PATIENCE_S = 30.0  # for host memory, the disk's index and the store
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """Play this turn of every conversation, with these answers in the prompts."""

    number: int
    script: Mapping[TurnId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests.

    Args:
        disk_blocks: blocks found on the disk.
        remote: state of the store that engines share.
    """

    disk_blocks: int
    remote: TierState


@dataclass(frozen=True, slots=True)
class Served:
    """A turn was served. The engine has counted these blocks, bytes and tokens.

    After a restart they include what a warm start read from the disk before the engine took requests. With a store they begin after the
    warm-up, whose prompt is found again too.

    Args:
        stored: blocks that came to the host.
        spilled: blocks that were written to the tier below the host.
        dropped: blocks that the host evicted before they were written.
        fetched: blocks that were read from that tier.
        fetched_tokens: tokens of hits that were fetched from it.
        written_bytes, read_bytes: to and from it.
    """

    stored: int = 0
    spilled: int = 0
    dropped: int = 0
    fetched: int = 0
    fetched_tokens: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """The round is over."""

    turns: tuple[Turn, ...]
    counted: Served
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot run, or could not go on."""

    reason: str


def serve(
    pipe: Connection,
    options: DemoOptions,
    conversations: Sequence[Conversation],
    offload: Mapping[str, object] | None,
) -> None:
    """Serve rounds until the demo ends or the pipe does: the process's main function.

    Args:
        pipe: to the demo.
        options: the demo's.
        conversations: to play.
        offload: kvoffload's settings, None without it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the demo ends this process
    configure(level=logging.WARNING)
    with suppress(EOFError, BrokenPipeError):
        try:
            asyncio.run(_serve(pipe, options, conversations, offload))
        except (KVOffloadError, EngineError) as error:
            pipe.send(Failed(str(error)))


async def _serve(
    pipe: Connection,
    options: DemoOptions,
    conversations: Sequence[Conversation],
    offload: Mapping[str, object] | None,
) -> None:
    plugin = load_plugin(PLUGIN) if offload is not None else None
    async with Engine(engine_config(options, offload), plugin) as engine:
        side: SchedulerSide | None = getattr(plugin, "offload", None)
        await _become_ready(engine, side, options)
        pipe.send(_ready(side))
        counted = _counter(side, has_store=options.remote is not None)
        script: dict[TurnId, tuple[int, ...]] = {}
        player = Player(engine, conversations, options, lambda: pipe.send(counted()), script)
        while (asked := await _next(pipe)) is not None:
            script.update(asked.script)
            await player.play_round(asked.number)
            turns = tuple(turn for turn in player.result().turns if turn.turn.turn == asked.number)
            problems = [*engine.audit(), *(side.audit() if side is not None else ())]
            pipe.send(Played(turns, counted(), tuple(problems)))


async def _next(pipe: Connection) -> Round | None:
    asked: Any = await asyncio.to_thread(pipe.recv)
    assert asked is None or isinstance(asked, Round), asked
    return asked


async def _become_ready(engine: Engine, side: SchedulerSide | None, options: DemoOptions) -> None:
    """Warm up until host memory is ready and the tiers below it are open; ranks report them with steps."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + _PATIENCE_S
    while True:
        await warm_up(engine, options.first_tokens, options.seed)
        if side is None or clock() > deadline:
            return
        now = side.gauges()
        if now.capacity_slots and {now.disk.state, now.remote} <= {TierState.OPEN, TierState.OFF}:
            return
        await asyncio.sleep(_POLL_S)


def _ready(side: SchedulerSide | None) -> Ready:
    if side is None:
        return Ready(0, TierState.OFF)
    now = side.gauges()
    return Ready(now.disk.slots.get("ready", 0), now.remote)


def _counter(side: SchedulerSide | None, *, has_store: bool) -> Callable[[], Served]:
    """Return what reads the counters."""
    if side is None:
        return Served
    before = side.counters.snapshot() if has_store else Snapshot()
    below = (Tier.REMOTE if has_store else Tier.DISK).value

    def counted() -> Served:
        now = side.counters.snapshot().minus(before)
        return Served(
            stored=now.count("kvoffload_store_blocks_total", "stored"),
            spilled=now.count("kvoffload_tier_blocks_total", below, "store", "done"),
            dropped=now.count("kvoffload_evicted_blocks_total", "host", "spill_behind"),
            fetched=now.count("kvoffload_tier_blocks_total", below, "load", "done"),
            fetched_tokens=now.count("kvoffload_fetched_tokens_total", below),
            written_bytes=now.count("kvoffload_transfer_bytes_total", below, "store"),
            read_bytes=now.count("kvoffload_transfer_bytes_total", below, "load"),
        )

    return counted
