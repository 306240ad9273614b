"""How large the engines are made, and what an audit says of offloading that is not at rest."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from kvoffload.cli.demo.audit import audit_offloading
from kvoffload.cli.demo.engines import engine_config, kv_blocks, open_engines
from kvoffload.cli.demo.options import Attention, DemoOptions
from kvoffload.cli.exits import CommandError
from kvoffload.engine.plugin import EnginePlugin
from kvoffload.model.causes import DegradeCause
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.gauges import GaugeSnapshot, TierGauges


@pytest.mark.parametrize("attention", get_args(Attention))
def test_by_default_the_conversations_need_the_devices_cache_several_times(attention: Attention) -> None:
    options = DemoOptions(attention=attention, reach_tokens=None if attention == "full" else 256)
    config = engine_config(options)
    assert config.num_blocks is not None
    assert kv_blocks(options, config) / (config.num_blocks - 1) > 2.5


def test_few_conversations_still_fit_while_they_are_served() -> None:
    options = DemoOptions(conversations=1)
    blocks = -(-options.conversation_tokens // 16)
    assert engine_config(options).num_blocks == blocks + 1


def test_given_blocks_do_not_count_the_null_block() -> None:
    assert engine_config(DemoOptions(device_blocks=300)).num_blocks == 301


def test_the_seed_draws_the_weights() -> None:
    assert engine_config(DemoOptions(seed=7)).model.seed == 7


async def opened(options: DemoOptions) -> None:
    async with open_engines(options):
        raise AssertionError("it opened")


@pytest.mark.asyncio
async def test_a_plugin_without_counters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.copying_plugin import CopyingPlugin

    plugin = cast("EnginePlugin", CopyingPlugin())
    monkeypatch.setattr("kvoffload.cli.demo.engines.load_plugin", lambda _: plugin)
    with pytest.raises(CommandError, match="shows no counters"):
        await opened(replace(DemoOptions(model="tiny"), offload={}))


def offloading(state: dict[str, Any]) -> SchedulerSide:
    gauges = GaugeSnapshot(**{"capacity_slots": sum(state.get("slots", {}).values()), **state})
    return cast("SchedulerSide", SimpleNamespace(counters=Counters(), audit=list, gauges=lambda: gauges))


@pytest.mark.parametrize(
    ("state", "problems"),
    [
        ({"slots": {"empty": 3, "ready": 2, "quarantined": 1}}, []),
        ({"open_jobs": {("store", "abandoned"): 1}}, []),
        (
            {"slots": {"empty": 3}, "capacity_slots": 4},
            ["slots of the host by state sum to 3, but the capacity is 4"],
        ),
        ({"slots": {"pinned": 2}}, ["2 slots of the host are still pinned"]),
        ({"open_jobs": {("load", "submitted"): 1}}, ["1 load jobs of the host are still submitted"]),
        (
            {
                "disk": TierGauges(
                    slots={"filling": 2}, capacity_slots=2, open_jobs={("store", "submitted"): 1}
                )
            },
            ["2 slots of the disk are still filling", "1 store jobs of the disk are still submitted"],
        ),
        ({"degraded": DegradeCause.LAW_BROKEN}, ["it was switched off: law_broken"]),
    ],
)
def test_what_is_left_of_offloading(state: dict[str, Any], problems: list[str]) -> None:
    assert audit_offloading(offloading(state)) == [f"offloading: {problem}" for problem in problems]
