"""What both sides make of vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_adapter.engine_rig import MARKS

pytestmark = MARKS


# vLLM tells each engine of a dense model that it is alone, and those of a mixture of experts how many they are.
@pytest.mark.parametrize("engines_known", [1, 2])
@pytest.mark.parametrize(("index", "file"), [(0, "journal"), (1, "journal.dp1")])
def test_each_engine_of_a_server_has_a_journal_of_its_own(index: int, file: str, engines_known: int) -> None:
    parallel = SimpleNamespace(
        data_parallel_index=index,
        data_parallel_size=engines_known,
        data_parallel_rank=index if engines_known > 1 else 0,
    )
    from kvoffload_vllm import assembly

    extra = SimpleNamespace(kv_connector_extra_config={"journal_path": "/somewhere/journal"})
    given: Any = SimpleNamespace(kv_transfer_config=extra, parallel_config=parallel)
    assert assembly._config(given).journal_path == Path("/somewhere", file)
