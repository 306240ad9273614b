"""A program that serves from one vLLM after another, each in processes of its own, and lives on when an engine dies.

    python -m tests.vllm.mortal_engine DESCRIPTOR CHECKPOINT FOLDER

Its engines write their journal and their blocks into the folder.
Takes one JSON object a line from a socket and answers each with one. Run by `deaths_rig.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.vllm.engine_rig import DEVICE_BLOCKS, transfer_config
from tests.vllm.stock import engines

_LONG_S = 300  # A copy that a test holds is not abandoned.


class Front:
    """What a request goes through before it reaches an engine."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._engine: Any = None
        self._asked = itertools.count()

    async def start(self, workers: int, **extra: Any) -> dict[str, Any]:
        """Start an engine with these settings of the connector too."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if workers == 2 else "0"
        connector = transfer_config(
            256,
            journal_path=str(self._folder / "journal"),
            disk_path=str(self._folder / "disk"),
            disk_bytes="16MiB",
            transfer_timeout_s=_LONG_S,
            **extra,
        )
        connector["kv_connector_module_path"] = "tests.vllm.gated_connector"
        options = {**engines.OPTIONS, "num_gpu_blocks_override": DEVICE_BLOCKS["qwen3"]}
        asked = AsyncEngineArgs(
            str(self._checkpoint),
            skip_tokenizer_init=True,
            tensor_parallel_size=workers,
            kv_transfer_config=KVTransferConfig(**connector),
            **options,
        )
        config = asked.create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = (
            "fork"  # The CPU platform says "spawn": 16 s more for each engine.
        )
        self._engine = AsyncLLM.from_vllm_config(config)
        return {}

    async def ask(self, prompts: list[list[int]], salt: str | None = None) -> dict[str, Any]:
        """Answer all at once; of each what came, or the name of what was raised."""
        done = await asyncio.gather(*(self._ask(one, salt) for one in prompts), return_exceptions=True)
        return {"answers": [one if isinstance(one, dict) else {"error": type(one).__name__} for one in done]}

    async def _ask(self, prompt: list[int], salt: str | None) -> dict[str, Any]:
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        asked: Any = {"prompt_token_ids": prompt}
        if salt is not None:
            asked["cache_salt"] = salt
        reported = [one async for one in self._engine.generate(asked, wanted, str(next(self._asked)))]
        answer = reported[-1].outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "reason": answer.finish_reason,
            "cached": reported[-1].num_cached_tokens,
        }

    async def forget(self) -> dict[str, Any]:
        """Make the device forget, which it refuses while a copy has its blocks."""
        while not await self._engine.reset_prefix_cache():
            pass
        return {}

    async def stop(self) -> dict[str, Any]:
        """End the engine as its owner does; one that is dead leaves nothing that the next one would meet."""
        self._engine.shutdown()
        self._engine = None
        return {}


async def serve(descriptor: int, front: Front) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    async for line in reader:
        words = json.loads(line)
        try:
            answer = await getattr(front, words.pop("do"))(**words)
        except Exception as error:  # the test's to judge
            traceback.print_exc()
            answer = {"error": type(error).__name__}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


def main(descriptor: int, checkpoint: Path, folder: Path) -> None:
    asyncio.run(serve(descriptor, Front(checkpoint, folder)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
