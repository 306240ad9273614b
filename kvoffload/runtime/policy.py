"""The core's policy from the operator's settings."""

from __future__ import annotations

from kvoffload.core.state import Policy
from kvoffload.model.config import OffloadConfig, check_promises, checks_first
from kvoffload.model.engine import EngineShape


def policy_of(config: OffloadConfig, shape: EngineShape, merge_steps: int) -> Policy:
    """Return the core's policy for these settings.

    Raises:
        ConfigError: the engine promises too little for it.
    """
    check_promises(config, shape.promises)
    least = config.min_load_tokens if isinstance(config.min_load_tokens, int) else shape.alignment
    check_first = checks_first(config, shape.promises)
    return Policy(config.store_policy, config.eviction_policy, least, merge_steps, check_first)
