"""The two engines. They differ in one thing: the second loads the plugin, by its entry point, as any engine would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.exits import CommandError
from kvoffload.engine import Engine, EngineConfig, ModelConfig
from kvoffload.engine.capacity import Capacity
from kvoffload.engine.errors import PoolTooSmall
from kvoffload.engine.groups import first_needed_block, make_groups
from kvoffload.engine.plugin import EnginePlugin, load_plugin
from kvoffload.runtime.scheduler_side import SchedulerSide

PLUGIN = "kvoffload"
_CACHE_SHARE = 4  # the conversations need this many times the device's cache, unless they are few
_LEAST_LENGTH = 4096  # tokens of the longest prompt and its answer
_SPARE_LENGTH = 16  # the prompt of the warm-up is a first message too, and its answer may be the longer one
_TINY = ModelConfig(hidden_size=64, heads=4, kv_heads=2, head_dim=16, ffn_size=96)


@dataclass(frozen=True, slots=True)
class Engines:
    """Both engines, running, and the scheduler's side of offloading."""

    plain: Engine
    offloaded: Engine
    offload: SchedulerSide


def engine_config(options: DemoOptions, offload: Mapping[str, object] | None = None) -> EngineConfig:
    """Return the engine's settings, with `offload` for its plugin.

    Raises:
        CommandError: the device's cache is too small for the conversations' last turns.
    """
    tokens = options.conversation_tokens
    config = EngineConfig(
        model=_model(options),
        num_blocks=options.device_blocks and options.device_blocks + 1,  # and the null block
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
            f"--device-blocks {options.device_blocks} is too small: the last turn of a conversation has {tokens:,} tokens, "
            f"which need {error.need_blocks:,} blocks; give that many, or fewer --turns"
        ) from error
    return config


@asynccontextmanager
async def open_engines(options: DemoOptions) -> AsyncIterator[Engines]:
    """Make both engines and run them; at the end, drain and stop them.

    The engine that is more likely to fail comes first. Neither has work before both exist.

    Raises:
        CommandError: the plugin is not kvoffload's, or there is no memory for an engine.
        KVOffloadError: the plugin refuses its settings.
        EngineError: the engine refuses its settings.
    """
    plugin = load_plugin(PLUGIN)
    async with _make(engine_config(options, options.offload), plugin) as offloaded:
        offload: SchedulerSide | None = getattr(plugin, "offload", None)
        if offload is None:
            raise CommandError(f"the engine plugin {PLUGIN!r} is not kvoffload's own: it shows no counters")
        async with _make(engine_config(options), None) as plain:
            yield Engines(plain, offloaded, offload)


def kv_blocks(options: DemoOptions, config: EngineConfig) -> int:
    """Return the blocks that all conversations together need to continue from their ends, in all groups."""
    return options.conversations * _conversation_blocks(options, config)


def _make(config: EngineConfig, plugin: EnginePlugin | None) -> Engine:
    try:
        return Engine(config, plugin)
    except (MemoryError, RuntimeError) as error:  # torch says so in either
        reason = str(error).partition("\n")[0] or "out of memory"
        raise CommandError(f"an engine on --device {config.device} cannot be made: {reason}") from error


def _device_blocks(options: DemoOptions, config: EngineConfig, capacity: Capacity) -> int:
    # One request is in the middle of its prompt, where windows and chunks need most; the others have passed theirs.
    others = min(options.concurrency, options.conversations) - 1
    least = capacity.request_blocks(options.conversation_tokens)
    least += others * _conversation_blocks(options, config)
    return max(least, kv_blocks(options, config) // _CACHE_SHARE)


def _conversation_blocks(options: DemoOptions, config: EngineConfig) -> int:
    tokens = options.conversation_tokens
    blocks = -(-tokens // config.block_tokens)
    return sum(blocks - first_needed_block(group, tokens) for group in make_groups(config))


def _model(options: DemoOptions) -> ModelConfig:
    reach = options.reach_tokens
    return replace(
        _TINY if options.model == "tiny" else ModelConfig(),
        attention=options.attention,
        window_tokens=reach if options.attention == "sliding_window" else None,
        chunk_tokens=reach if options.attention == "chunked_local" else None,
        seed=options.seed,
    )
