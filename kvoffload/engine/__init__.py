"""A small, plain and real inference engine with a paged KV cache and plugin hooks.

It stands alone and knows no plugin. One request's way:

    admission   is it servable at all                     capacity   how many blocks can it come to hold
    scheduler   waits, runs, loads, loses its blocks      tables     its blocks: admit, grow, recycle, release
    block_pool  reference counts and the prefix index     prefix     what of it the device still holds
    runner      batch_input -> model -> likeliest token   stream     the caller's end
"""

from kvoffload.engine.config import EngineConfig, ModelConfig, SamplingParams
from kvoffload.engine.engine import Engine, EngineStatistics
from kvoffload.engine.errors import (
    ConfigError,
    EngineError,
    EngineStopped,
    PluginError,
    PoolExhausted,
    PoolTooSmall,
    PromptTooLong,
    RequestRefused,
)
from kvoffload.engine.request import RequestStats, Token
from kvoffload.engine.stream import TokenStream

__all__ = [
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStatistics",
    "EngineStopped",
    "ModelConfig",
    "PluginError",
    "PoolExhausted",
    "PoolTooSmall",
    "PromptTooLong",
    "RequestRefused",
    "RequestStats",
    "SamplingParams",
    "Token",
    "TokenStream",
]
