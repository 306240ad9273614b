"""Unsupported setups are refused at start, with one sentence about the remedy."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.vllm.engine_rig import MARKS, offloading
from tests.vllm.stock import checkpoints

pytestmark = MARKS


def is_too_old() -> bool:
    """Return whether this vLLM, as every one before 0.28, expects recurrent states that our hits lack."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return not hasattr(base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits")


def recovers_several_groups() -> bool:
    """Return whether this version accepts a failed load of a hybrid model."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def is_refused(kind: checkpoints.Kind) -> bool:
    """Return whether this version must refuse a model of this kind."""
    return is_too_old() or (kind != "qwen3" and not recovers_several_groups())


@pytest.mark.skipif("KVOFFLOAD_VLLM" not in os.environ, reason="no version was asked for: make vllm-versions")
def test_it_is_the_version_that_was_asked_for() -> None:
    import vllm

    assert vllm.__version__ == os.environ["KVOFFLOAD_VLLM"]


def test_a_hybrid_model_where_its_failed_loads_cannot_be_reported(folder: Path) -> None:
    if is_too_old() or recovers_several_groups():
        pytest.skip("this version recovers them, or is refused altogether")
    with (
        pytest.raises(Exception, match=r"use vLLM 0\.30 or newer, or a model with one group"),
        offloading("gemma3", folder),
    ):
        pass


def test_a_version_that_lacks_a_hook(folder: Path) -> None:
    """A version that is too old lacks a hook. For other versions, the test requires a hook that no version has."""
    missing = "supports_divergent_local_hybrid_hits" if is_too_old() else "a_hook_of_another_version"
    lacking = nullcontext() if is_too_old() else patch("kvoffload_vllm.support.NEEDED", (missing,))
    with (
        lacking,
        pytest.raises(Exception, match=rf"lacks {missing}; the connector works with vLLM 0\.28 and newer"),
        offloading("qwen3", folder),
    ):
        pass


def test_sleep_mode(folder: Path) -> None:
    from vllm.platforms import current_platform

    if is_too_old():
        pytest.skip("this version is refused altogether")
    with (
        patch.object(type(current_platform), "is_sleep_mode_available", lambda self: True),
        pytest.raises(Exception, match="start without --enable-sleep-mode"),
        offloading("qwen3", folder, enable_sleep_mode=True),
    ):
        pass
