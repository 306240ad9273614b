"""Runs one rank of a stock vLLM with the connector. torchrun starts this program once per rank.

    torchrun --nproc-per-node 2 -m tests.vllm.externally_launched CHECKPOINT FOLDER

Each rank writes to `FOLDER/RANK` that its engine started, or why it did not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvoffload.model.errors import ConfigError
from tests.vllm.engine_rig import transfer_config
from tests.vllm.stock import engines


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
