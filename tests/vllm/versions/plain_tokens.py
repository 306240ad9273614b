"""Prints the tokens of an engine without a connector for the small suite's requests, with this process's
model runner.

    python -m tests.vllm.versions.plain_tokens qwen3 FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from tests.vllm.engine_rig import plain
from tests.vllm.stock.checkpoints import Kind
from tests.vllm.versions.test_small_suite import DEVICE, REQUESTS


def plain_tokens(kind: Kind, folder: Path) -> dict[str, Any]:
    """Return the name of the model runner, and the tokens by request."""
    with plain(kind, folder, **DEVICE) as rig:
        runner = rig.core.model_executor.driver_worker.worker.model_runner
        reported = rig.run(REQUESTS)
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "tokens": {name: list(one.tokens) for name, one in reported.items()},
    }


if __name__ == "__main__":
    print(json.dumps(plain_tokens(cast("Kind", sys.argv[1]), Path(sys.argv[2]))))  # noqa: T201  # for the caller
