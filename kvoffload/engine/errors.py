"""Errors of the reference engine."""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(Exception):
    """The base of every error that this engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """Raised when a configuration cannot be used. Lists every problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class PluginError(EngineError):
    """Raised when a plugin cannot be found, or reports the end of a load that is not open."""


class RequestRefused(EngineError, ValueError):
    """Raised when a request can never be served. Nothing was queued."""


class PromptTooLong(RequestRefused):
    """Raised when the prompt and the new tokens are longer than the model allows."""

    def __init__(self, prompt_tokens: int, new_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and asks for {new_tokens} new ones, together "
            f"{prompt_tokens + new_tokens}; max_model_len is {max_model_len}: shorten the prompt, "
            f"ask for fewer new tokens, or raise max_model_len"
        )


class PoolTooSmall(RequestRefused):
    """Raised when a request needs more blocks than the whole pool has."""

    def __init__(self, tokens: int, need_blocks: int, pool_blocks: int) -> None:
        self.need_blocks = need_blocks
        super().__init__(
            f"a request of {tokens} tokens (prompt and new ones) needs {need_blocks} KV blocks at a "
            f"time; the pool has {pool_blocks}: raise num_blocks to at least {need_blocks + 1} "
            f"(one block is the null block), shorten the prompt, or ask for fewer new tokens"
        )


class PoolExhausted(EngineError):
    """Raised for a request that cannot get blocks because a plugin leases them and has no pending work."""

    def __init__(self, leased_blocks: int, pool_blocks: int) -> None:
        super().__init__(
            f"{leased_blocks} of the pool's {pool_blocks} KV blocks are leased by the plugin, which "
            f"reports no pending work: this request cannot be served any more"
        )


class EngineStopped(EngineError):
    """Raised for requests that are open when the engine stops, or are submitted later."""
