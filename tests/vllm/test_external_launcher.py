"""Tests that ranks started by torchrun are refused, because each has its own scheduler.

    torchrun --nproc-per-node 2 -m tests.vllm.test_external_launcher CHECKPOINT FOLDER

Each rank writes to `FOLDER/RANK` whether its engine started, and if not, why.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvoffload.model.errors import ConfigError
from tests.vllm.engine_rig import MARKS, transfer_config
from tests.vllm.programs import run_module
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS


def test_each_rank_is_refused_with_one_error(folder: Path, tmp_path: Path) -> None:
    # Regression: such an engine started and allocated host memory but never used it, because a rank's
    # scheduler received reports only from its own worker.
    checkpoint = checkpoints.make("qwen3", folder / "qwen3")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = engines.TWO_WORKERS["environment"]
    run_module(__name__, checkpoint, tmp_path, launcher=launcher, environment=environment)
    for rank in ("0", "1"):
        reported = (tmp_path / rank).read_text()
        assert "distributed_executor_backend is 'external_launcher' with 2 ranks" in reported
        assert "start with mp or ray" in reported


def main(checkpoint: Path, folder: Path) -> None:
    reported = "it started"
    try:
        with engines.in_process(
            checkpoint,
            tensor_parallel_size=2,
            distributed_executor_backend="external_launcher",
            kv_transfer_config=transfer_config(64),
        ):
            pass
    except ConfigError as error:
        reported = str(error)
    (folder / os.environ["RANK"]).write_text(reported)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
