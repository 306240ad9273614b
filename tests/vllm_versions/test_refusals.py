"""What a version cannot do is refused at start, with one sentence that says what to do instead."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from tests.vllm_adapter.engine_rig import MARKS, offloading

pytestmark = MARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "checkpoints"


def recovers_several_groups() -> bool:
    """Whether this version can be told of a failed load of a hybrid model."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def test_a_hybrid_model_where_its_failed_loads_cannot_be_told(folder: Path) -> None:
    if recovers_several_groups():
        pytest.skip("this version recovers them")
    with (
        pytest.raises(Exception, match=r"use vLLM 0\.30 or newer, or a model with one group"),
        offloading("gemma3", folder),
    ):
        pass


def test_a_version_that_lacks_a_hook(folder: Path) -> None:
    with (
        patch("kvoffload_vllm.support._NEEDED", ("a_hook_of_another_version",)),
        pytest.raises(
            Exception, match=r"lacks a_hook_of_another_version; the connector works with vLLM 0\.28"
        ),
        offloading("qwen3", folder),
    ):
        pass
