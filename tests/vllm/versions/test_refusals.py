from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.vllm.engine_rig import MARKS, offloading
from tests.vllm.stock import checkpoints

pytestmark = MARKS


def is_too_old() -> bool:
    """Return whether this vLLM is older than 0.28, which expects recurrent states that our hits lack."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return not hasattr(base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits")


def recovers_several_groups() -> bool:
    """Return whether this version can continue after a failed load with a hybrid model."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def is_refused(kind: checkpoints.Kind) -> bool:
    """Return whether the connector must refuse a model of this kind on this version."""
    return is_too_old() or (kind != "qwen3" and not recovers_several_groups())


@pytest.mark.skipif("KVOFFLOAD_VLLM" not in os.environ, reason="no version was asked for: make vllm-versions")
def test_the_requested_version_runs() -> None:
    import vllm

    assert vllm.__version__ == os.environ["KVOFFLOAD_VLLM"]


def check_refused(words: str, kind: checkpoints.Kind, folder: Path, **options: Any) -> None:
    with pytest.raises(Exception, match=words), offloading(kind, folder, **options):
        pass


def test_a_hybrid_model_is_refused_if_failed_loads_cannot_be_reported(folder: Path) -> None:
    if is_too_old() or recovers_several_groups():
        pytest.skip("this version recovers them, or is refused altogether")
    check_refused(r"use vLLM 0\.30 or newer, or a model with one group", "gemma3", folder)


def test_a_version_that_lacks_a_hook_is_refused(folder: Path) -> None:
    """Before 0.28, a hook is missing. On other versions, the test requires a hook that does not exist."""
    missing = "supports_divergent_local_hybrid_hits" if is_too_old() else "a_hook_of_another_version"
    with nullcontext() if is_too_old() else patch("kvoffload_vllm.support.NEEDED", (missing,)):
        check_refused(rf"lacks {missing}; the connector works with vLLM 0\.28 and newer", "qwen3", folder)


def test_sleep_mode_is_refused_where_vllm_does_not_tell_connectors(folder: Path) -> None:
    from vllm.platforms import current_platform

    from kvoffload_vllm.support import find_features

    if is_too_old():
        pytest.skip("this version is refused altogether")
    if find_features().announces_sleep:
        pytest.skip("this version tells connectors that it sleeps")
    with patch.object(type(current_platform), "is_sleep_mode_available", lambda self: True):
        check_refused("start without --enable-sleep-mode", "qwen3", folder, enable_sleep_mode=True)
