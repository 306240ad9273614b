"""One engine of `demo --restart`, in a process of its own, so that it can be killed as a crash would.

the demo      Round(number, script) ─▶                        None: end
this process  Ready ─▶   Served, Served, ... ─▶ Played ─▶
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
from kvoffload.engine import Engine
from kvoffload.engine.plugin import load_plugin
from kvoffload.logs import configure
from kvoffload.telemetry.labels import TierState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    from kvoffload.runtime.scheduler_side import SchedulerSide

_PATIENCE_S = 30.0  # for host memory and the disk's index
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """Play this turn of every conversation, with these answers in the prompts."""

    number: int
    script: Mapping[TurnId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests; the disk has these blocks from before."""

    disk_blocks: int


@dataclass(frozen=True, slots=True)
class Served:
    """A turn was served. Since its start the engine has counted these blocks and bytes.

    Args:
        stored: blocks that came to the host.
        spilled: blocks that were written to the disk.
        dropped: blocks that the host evicted before they could be.
        fetched: blocks that were read from the disk.
        written_bytes, read_bytes: of the disk.
    """

    stored: int = 0
    spilled: int = 0
    dropped: int = 0
    fetched: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """The round is over."""

    turns: tuple[Turn, ...]
    counted: Served
    problems: tuple[str, ...]


def serve(
    pipe: Connection,
    options: DemoOptions,
    conversations: Sequence[Conversation],
    offload: Mapping[str, object] | None,
) -> None:
    """Serve rounds until the demo ends or the pipe does. What this process is started with.

    Args:
        pipe: to the demo.
        options: the demo's.
        conversations: to play.
        offload: kvoffload's settings, None without it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the demo ends this process
    configure(level=logging.WARNING)
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(_serve(pipe, options, conversations, offload))


async def _serve(
    pipe: Connection,
    options: DemoOptions,
    conversations: Sequence[Conversation],
    offload: Mapping[str, object] | None,
) -> None:
    plugin = load_plugin(PLUGIN) if offload is not None else None
    side: SchedulerSide | None = None
    async with Engine(engine_config(options, offload), plugin) as engine:
        side = getattr(plugin, "offload", None)
        await _become_ready(engine, side, options)
        disk = side.gauges().disk if side is not None else None
        pipe.send(Ready(disk.slots.get("ready", 0) if disk is not None else 0))
        script: dict[TurnId, tuple[int, ...]] = {}
        player = Player(engine, conversations, options, lambda: pipe.send(_counted(side)), script)
        while (asked := await _next(pipe)) is not None:
            script.update(asked.script)
            await player.play_round(asked.number)
            turns = tuple(turn for turn in player.result().turns if turn.turn.turn == asked.number)
            problems = [*engine.audit(), *(side.audit() if side is not None else ())]
            pipe.send(Played(turns, _counted(side), tuple(problems)))


async def _next(pipe: Connection) -> Round | None:
    asked: Any = await asyncio.to_thread(pipe.recv)
    assert asked is None or isinstance(asked, Round), asked
    return asked


async def _become_ready(engine: Engine, side: SchedulerSide | None, options: DemoOptions) -> None:
    """Warm up, until host memory is there and the disk's index was read: ranks report with steps."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + _PATIENCE_S
    while True:
        await warm_up(engine, options.first_tokens, options.seed)
        if side is None or clock() > deadline:
            return
        now = side.gauges()
        if now.capacity_slots and now.disk.state in (TierState.OPEN, TierState.OFF):
            return
        await asyncio.sleep(_POLL_S)


def _counted(side: SchedulerSide | None) -> Served:
    if side is None:
        return Served()
    now = side.counters.snapshot()
    return Served(
        stored=now.count("kvoffload_store_blocks_total", "stored"),
        spilled=now.count("kvoffload_tier_blocks_total", "disk", "store", "done"),
        dropped=now.count("kvoffload_evicted_blocks_total", "host", "spill_behind"),
        fetched=now.count("kvoffload_tier_blocks_total", "disk", "load", "done"),
        written_bytes=now.count("kvoffload_transfer_bytes_total", "disk", "store"),
        read_bytes=now.count("kvoffload_transfer_bytes_total", "disk", "load"),
    )
