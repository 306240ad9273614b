"""What several suites on a stock vLLM share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm_adapter.engine_rig import Hands


@pytest.fixture
def hands(engine: Hands) -> Iterator[Hands]:
    """The module's `engine`, empty and with nothing held, before and after."""
    rig, held = engine
    rig.reported.clear()
    rig.forget()
    yield rig, held
    held.copier.release()
    rig.check_clean()
