"""Starts two ranks of a stock vLLM with torchrun. Both are refused, because each has its own scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.vllm.engine_rig import MARKS
from tests.vllm.stock import checkpoints, engines

if TYPE_CHECKING:
    import pytest

pytestmark = MARKS


def test_each_rank_is_refused_with_one_error(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Regression: such an engine started and allocated host memory but never used it, because a rank's
    # scheduler received reports only from its own worker.
    checkpoint = checkpoints.make("qwen3", tmp_path_factory.getbasetemp() / "checkpoints" / "qwen3")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.vllm.externally_launched", str(checkpoint), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={**os.environ, **engines.TWO_WORKERS["environment"], "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    for rank in ("0", "1"):
        reported = (tmp_path / rank).read_text()
        assert "distributed_executor_backend is 'external_launcher' with 2 ranks" in reported
        assert "start with mp or ray" in reported
