from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tooling.scripts import ROOT
from tests.vllm.engine_rig import MARKS
from tests.vllm.stock import checkpoints, engines
from tests.vllm.versions.matrix import V2_RUNNER
from tests.vllm.versions.plain_tokens import plain_tokens

pytestmark = [
    *MARKS,
    pytest.mark.skipif(not engines.IS_V2_RUNNER, reason="for runner V2: make vllm-versions"),
]


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_both_runners_give_the_same_answers(
    kind: checkpoints.Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "checkpoints"
    ours, of_v1 = plain_tokens(kind, folder), tokens_of_v1(kind, folder)
    assert ours["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert of_v1["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert ours["tokens"] == of_v1["tokens"]


def tokens_of_v1(kind: checkpoints.Kind, folder: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in V2_RUNNER}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.vllm.versions.plain_tokens", kind, str(folder)],
        env={**environment, "VLLM_USE_V2_MODEL_RUNNER": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
