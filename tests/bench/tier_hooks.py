"""Measures the time that a lower tier adds to the scheduler's hooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from kvoffload.cli.demo.engines import PLUGIN, engine_config
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.play import Player, make_conversations, warm_up
from kvoffload.cli.exits import CommandError
from kvoffload.engine import Engine
from kvoffload.engine.plugin import load_plugin
from kvoffload.model.wire import Tier
from kvoffload.telemetry.catalogue import TierState, tier_state

if TYPE_CHECKING:
    from kvoffload.runtime.scheduler_side import SchedulerSide

Served: TypeAlias = "tuple[Engine, SchedulerSide]"

OUTGROWS = DemoOptions(
    conversations=12, turns=10, first_tokens=384, turn_tokens=96, answer_tokens=24, model="tiny"
)
"""Conversations that do not fit in the host memory of `HOST`."""
HOST: Mapping[str, object] = {"host_bytes": "18MiB"}
NEVER = 2**30
"""A minimum number of hits that no block reaches, so that nothing is written to the tier."""
_PATIENCE_S = 120.0


@asynccontextmanager
async def served(options: DemoOptions, settings: Mapping[str, object]) -> AsyncIterator[Served]:
    """Run an engine during the `with` block, after its host memory is ready and its lower tiers are open."""
    plugin = load_plugin(PLUGIN)
    async with Engine(engine_config(options, settings), plugin) as engine:
        side: SchedulerSide | None = getattr(plugin, "offload", None)
        assert side is not None, plugin
        await until(engine, "all host memory", lambda: _has_its_memory(side))
        await warm_up(engine, options.first_tokens, options.seed)
        if "disk_path" in settings:
            await until(engine, "the disk to open", lambda: tier_state(side, Tier.DISK) is TierState.OPEN)
        if "remote_url" in settings:
            await until(
                engine, "the store to answer", lambda: tier_state(side, Tier.REMOTE) is TierState.OPEN
            )
        yield engine, side


def _has_its_memory(side: SchedulerSide) -> bool:
    size = side.gauges()["kvoffload_host_bytes"]
    return 0 < size["wanted",] == size["reserved",]


async def until(engine: Engine | None, what: str, holds: Callable[[], bool]) -> None:
    """Wait until a condition is true.

    Args:
        engine: an engine to step while waiting, or None.
        what: a description of the condition, for the error.
        holds: returns whether the condition is true.

    Raises:
        CommandError: the condition was not true within `_PATIENCE_S`.
    """
    now = asyncio.get_running_loop().time
    end = now() + _PATIENCE_S
    while not holds():
        if now() > end:
            raise CommandError(f"waited in vain for {what}: {_PATIENCE_S:g} s")
        if engine is not None:
            engine.step()
        await asyncio.sleep(0.01)


def moved(side: SchedulerSide, tier: str, way: str) -> float:
    """Return the number of blocks copied to a lower tier ("store") or from a lower tier ("load")."""
    return side.counters.snapshot().count("kvoffload_tier_blocks_total", tier, way, "done")


async def hook_seconds(engines: Mapping[str, Served]) -> dict[str, list[float]]:
    """Play `OUTGROWS` on all engines, which alternate after each round. Return each engine's hook seconds by round."""
    conversations = make_conversations(OUTGROWS)
    players: dict[str, Player] = {}
    for name, (engine, _) in engines.items():
        script = next(iter(players.values())).answers if players else None
        players[name] = Player(engine, conversations, OUTGROWS, lambda _: None, script)
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(OUTGROWS.turns):
        for name, player in players.items():
            before = _spent(engines[name][1])
            await player.play_round(number)
            spent[name].append(_spent(engines[name][1]) - before)
    return spent


def _spent(side: SchedulerSide) -> float:
    hooks = side.counters.snapshot().distributions["kvoffload_hook_seconds"]
    return sum(each.total for each in hooks.values())
