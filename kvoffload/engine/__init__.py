"""A small, plain and real inference engine with a paged KV cache and plugin hooks.

It stands alone and knows no plugin. One request's way:

    engine      is it servable at all                     groups     how many blocks can it come to hold
    scheduler   waits, runs, loads, loses its blocks      tables     its blocks: find, admit, grow, recycle, release
    block_pool  reference counts and the prefix index     request    its tokens and keys, and the caller's end
    runner      batch_input -> model -> likeliest token
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
from kvoffload.engine.request import RequestStats, Token, TokenStream

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
