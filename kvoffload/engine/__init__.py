"""A small but real inference engine with a paged KV cache and plugin hooks.

The engine works without a plugin. A request passes through these modules:

    engine      can the request be served at all?         groups     how many blocks can it hold at most?
    scheduler   makes it wait, load, run or lose blocks    tables     find, admit, grow, recycle, release its blocks
    block_pool  reference counts and the prefix index     request    its tokens and keys, and the caller's stream
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
