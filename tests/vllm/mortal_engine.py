"""Serves from one vLLM after another, each in separate processes, and survives an engine's death.

    python -m tests.vllm.mortal_engine DESCRIPTOR CHECKPOINT FOLDER

The engines write their journal and their blocks to the folder. The program reads JSON objects from a socket,
one per line, and answers each with a JSON object. `deaths_rig.py` runs this program.
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

_LONG_S = 300  # longer than a test holds a copy, so that no copy times out


class Front:
    """Passes requests to an engine in other processes."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._engine: Any = None
        self._asked = itertools.count()

    async def start(self, workers: int, **extra: Any) -> dict[str, Any]:
        """Start an engine. `extra` are further settings of the connector."""
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
        # With "spawn", which vLLM's CPU platform sets, an engine takes 16 s longer to start.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._engine = AsyncLLM.from_vllm_config(config)
        return {}

    async def ask(self, prompts: list[list[int]], salt: str | None = None) -> dict[str, Any]:
        """Serve all prompts concurrently. Return each answer, or the name of the error."""
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
        """Reset the device's cache. Repeat the reset until it succeeds: it fails while a copy uses a block."""
        while not await self._engine.reset_prefix_cache():
            pass
        return {}

    async def stop(self) -> dict[str, Any]:
        """Shut the engine down, whether or not it has died."""
        self._engine.shutdown()
        self._engine = None
        return {}


async def serve(descriptor: int, front: Front) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    async for line in reader:
        words = json.loads(line)
        try:
            answer = await getattr(front, words.pop("do"))(**words)
        except Exception as error:  # the test checks the error
            traceback.print_exc()
            answer = {"error": type(error).__name__}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


def main(descriptor: int, checkpoint: Path, folder: Path) -> None:
    asyncio.run(serve(descriptor, Front(checkpoint, folder)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
