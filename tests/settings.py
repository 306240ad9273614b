"""Settings for tests that do not care how much host memory there is."""

from __future__ import annotations

from kvoffload.model.config import OffloadConfig


def make_config(**given: object) -> OffloadConfig:
    """Return these settings, with room for everything that a test stores."""
    return OffloadConfig(**{"host_bytes": 8 * 2**30, **given})  # type: ignore[arg-type]  # passed through
