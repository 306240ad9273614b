"""Tests that both of vLLM's model runners give the same answers without a connector.

    python -m tests.vllm.versions.test_runners qwen3 FOLDER RESULT

This command writes the tokens of its process's model runner to RESULT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.vllm.engine_rig import MARKS, plain
from tests.vllm.programs import run_module
from tests.vllm.scenes import requests_for
from tests.vllm.stock import checkpoints, engines
from tests.vllm.versions.matrix import V2_RUNNER

pytestmark = [
    *MARKS,
    pytest.mark.skipif(not engines.IS_V2_RUNNER, reason="for runner V2: make vllm-versions"),
]


def tokens(kind: checkpoints.Kind, folder: Path) -> dict[str, Any]:
    """Return the name of the model runner, and the tokens by request."""
    with plain(kind, folder, num_gpu_blocks_override=512) as rig:
        runner = type(rig.core.model_executor.driver_worker.worker.model_runner)
        reported = rig.run(requests_for(kind))
    return {"runner": runner.__module__, "tokens": {name: [*one.tokens] for name, one in reported.items()}}


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_both_runners_give_the_same_answers(kind: checkpoints.Kind, folder: Path, tmp_path: Path) -> None:
    environment = {**dict.fromkeys(V2_RUNNER), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    run_module(__name__, kind, folder, tmp_path / "tokens", environment=environment)
    of_v1, of_v2 = json.loads((tmp_path / "tokens").read_text()), tokens(kind, folder)
    assert of_v1["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert of_v2["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert of_v1["tokens"] == of_v2["tokens"]


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(tokens(cast("checkpoints.Kind", sys.argv[1]), Path(sys.argv[2]))))
