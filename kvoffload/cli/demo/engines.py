"""Starts and audits the demo's two engines, of which only one loads kvoffload's plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvoffload.cli.demo.options import LAYERS, DemoOptions
from kvoffload.cli.exits import CommandError
from kvoffload.engine import Engine, EngineConfig, ModelConfig
from kvoffload.engine.errors import PoolTooSmall
from kvoffload.engine.groups import Capacity, first_needed_block, make_groups
from kvoffload.engine.plugin import EnginePlugin, load_plugin

if TYPE_CHECKING:
    from kvoffload.runtime.scheduler_side import SchedulerSide

PLUGIN = "kvoffload"
_CACHE_SHARE = 4  # by default, the device's cache has room for 1/4 of all conversations
_LEAST_LENGTH = 4096  # the minimum `max_model_len`, in tokens
_SPARE_LENGTH = 16  # in tokens: the warm-up's answer may be longer than the conversations' answers
_TINY = ModelConfig(hidden_size=64, heads=4, kv_heads=2, head_dim=16, ffn_size=96)
_WINDOW_TOKENS = {"small": 256, "tiny": 48}
_AT_REST = {"empty", "ready", "quarantined"}


@dataclass(frozen=True, slots=True)
class Engines:
    """Both running engines, and the scheduler side of kvoffload's plugin."""

    plain: Engine
    offloaded: Engine
    offload: SchedulerSide


def engine_config(options: DemoOptions, offload: Mapping[str, object] | None = None) -> EngineConfig:
    """Return an engine's settings.

    Args:
        options: the demo's options.
        offload: kvoffload's settings; None for an engine without the plugin.

    Raises:
        CommandError: the device's cache is too small for the conversations' last turns.
        EngineError: the engine does not accept its settings.
    """
    tokens = options.conversation_tokens
    config = EngineConfig(
        model=_model(options),
        # `num_blocks` includes the null block.
        num_blocks=options.device_blocks and options.device_blocks + 1,
        max_model_len=max(tokens + _SPARE_LENGTH, _LEAST_LENGTH),
        device=options.device,
        plugin_config=offload or {},
    )
    capacity = Capacity(make_groups(config), config.step_tokens, config.max_model_len)
    if options.device_blocks is None:
        return replace(config, num_blocks=_device_blocks(options, config, capacity) + 1)
    try:
        capacity.check_fits(tokens, options.device_blocks)
    except PoolTooSmall as error:
        raise CommandError(
            f"--device-blocks {options.device_blocks} is too small: the last turn of a conversation has {tokens:,} "
            f"tokens, which need {error.need_blocks:,} blocks; give that many, or fewer --turns"
        ) from error
    return config


@asynccontextmanager
async def open_engine(options: DemoOptions) -> AsyncIterator[tuple[Engine, SchedulerSide]]:
    """Start an engine with offloading. When the `with` block ends, drain and stop the engine.

    Raises:
        CommandError: the machine has too little memory for the engine.
        KVOffloadError: the plugin does not accept its settings.
        EngineError: the engine does not accept its settings.
    """
    plugin = load_plugin(PLUGIN)
    async with _make(engine_config(options, options.offload), plugin) as engine:
        yield engine, plugin.offload  # type: ignore[attr-defined]  # kvoffload's plugin has this attribute


@asynccontextmanager
async def open_engines(options: DemoOptions) -> AsyncIterator[Engines]:
    """Start both engines, first the engine with the plugin, which is more likely to fail.

    Raises:
        CommandError, KVOffloadError, EngineError: for the same reasons as in `open_engine`.
    """
    async with open_engine(options) as (engine, offload), _make(engine_config(options), None) as plain:
        yield Engines(plain, engine, offload)


def kv_blocks(options: DemoOptions, config: EngineConfig) -> int:
    """Return how many KV blocks, over all groups, the device would need to hold all conversations."""
    return options.conversations * _conversation_blocks(options, config)


def audit(engines: Engines) -> list[str]:
    """Return a message for each invariant that the idle engines break, and for each resource still in use."""
    return [
        *audit_engine(engines.plain, "engine without offloading"),
        *audit_engine(engines.offloaded, "engine with offloading"),
        *audit_offloading(engines.offload),
    ]


def audit_engine(engine: Engine, name: str) -> list[str]:
    """Return a message for each invariant that an idle engine breaks, and for each resource still in use."""
    numbers = engine.statistics()
    held = {
        "waiting requests": numbers.waiting,
        "loading requests": numbers.loading,
        "running requests": numbers.running,
        "leased blocks": numbers.leased_blocks,
        "blocks in use": engine.pool.usable_blocks - numbers.free_blocks,
    }
    left = [f"{number} {what} are left" for what, number in held.items() if number]
    return [f"{name}: {problem}" for problem in (*engine.audit(), *left)]


def audit_offloading(offload: SchedulerSide) -> list[str]:
    """Return a message for each invariant that an idle plugin breaks, and for each slot and job still in use."""
    return [f"offloading: {problem}" for problem in _problems(offload)]


def _problems(offload: SchedulerSide) -> Iterator[str]:
    yield from offload.audit()
    gauges = offload.gauges()
    for (cause,), is_off in gauges["kvoffload_degraded"].items():
        if is_off:
            yield f"it was switched off: {cause}"
    for (tier, state), slots in gauges.get("kvoffload_slots", {}).items():
        if slots and state not in _AT_REST:
            yield f"{slots} slots of the {tier} are still {state}"
    for (tier, direction, state), jobs in gauges.get("kvoffload_open_jobs", {}).items():
        if jobs and state != "abandoned":  # abandoned jobs have their own metrics
            yield f"{jobs} {direction} jobs of the {tier} are still {state}"


def _make(config: EngineConfig, plugin: EnginePlugin | None) -> Engine:
    try:
        return Engine(config, plugin)
    except (MemoryError, RuntimeError) as error:  # torch raises either error if memory runs out
        reason = str(error).partition("\n")[0] or "out of memory"
        raise CommandError(f"an engine on --device {config.device} cannot be made: {reason}") from error


def _device_blocks(options: DemoOptions, config: EngineConfig, capacity: Capacity) -> int:
    # With windows or chunks, a request needs the most blocks while its prompt is computed. The engine computes one
    # prompt at a time, so the other requests need only the blocks that they keep afterwards.
    others = min(options.concurrency, options.conversations) - 1
    least = capacity.request_blocks(options.conversation_tokens)
    least += others * _conversation_blocks(options, config)
    return max(least, kv_blocks(options, config) // _CACHE_SHARE)


def _conversation_blocks(options: DemoOptions, config: EngineConfig) -> int:
    tokens = options.conversation_tokens
    blocks = -(-tokens // config.block_tokens)
    return sum(blocks - first_needed_block(group, tokens) for group in make_groups(config))


def _model(options: DemoOptions) -> ModelConfig:
    return replace(
        _TINY if options.model == "tiny" else ModelConfig(),
        attention=LAYERS[options.layers],
        window_tokens=_WINDOW_TOKENS[options.model] if options.layers == "window" else None,
        seed=options.seed,
    )
