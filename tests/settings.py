"""Makes settings for tests in which the size of host memory does not matter."""

from __future__ import annotations

from kvoffload.model.config import OffloadConfig


def make_config(**given: object) -> OffloadConfig:
    """Return these settings, with enough host memory for everything that a test stores."""
    return OffloadConfig(**{"host_bytes": 8 * 2**30, **given})  # type: ignore[arg-type]  # passed through
