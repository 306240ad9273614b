"""Serves requests from one vLLM after another, each in separate processes, and holds their workers' copies.

    python -m tests.vllm.deaths_rig DESCRIPTOR CHECKPOINT FOLDER

This program survives an engine's death. It reads JSON objects from a socket, one per line, and answers each with a
JSON object. The engines write their journal and their blocks to the folder. `fronting` runs this program.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.copy_gate import GATE, CopyGate
from tests.vllm.engine_rig import DEVICE_BLOCKS, transfer_config
from tests.vllm.programs import python_path
from tests.vllm.stock import engines

_PATIENCE_S = 120.0
_LONG_S = 300  # longer than a test holds a copy, so that no copy times out


class Front(engines.Server):
    """Controls the process that receives requests. Its engines' processes are its children."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, log: Path) -> None:
        super().__init__(process, 0, log)
        self._words = line.makefile("rw")

    def say(self, do: str, **words: Any) -> None:
        self._words.write(json.dumps({"do": do, **words}) + "\n")
        self._words.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for the answer to the oldest unanswered command."""
        answer = dict(json.loads(self._words.readline()))
        assert "error" not in answer, (answer, self.log.read_text()[-8000:])
        return answer

    def do(self, do: str, **words: Any) -> dict[str, Any]:
        self.say(do, **words)
        return self.hear()


@contextmanager
def fronting(checkpoint: Path, folder: Path) -> Iterator[tuple[Front, CopyGate]]:
    """Start the process that receives requests, without an engine, and the gate for its engines' copies.

    Both keep their files in `folder`.
    """
    gate = CopyGate(folder / "gate")
    ours, theirs = socket.socketpair()
    ours.settimeout(_PATIENCE_S)
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": python_path(),
        "TMPDIR": str(folder),
        GATE: str(folder / "gate"),
    }
    words = [str(theirs.fileno()), str(checkpoint), str(folder)]
    with (folder / "log").open("wb") as log, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=environment,
        )
    made = Front(process, ours, folder / "log")
    try:
        yield made, gate
    finally:
        gate.close()
        ours.close()
        made.stop()


# -- the program --------------------------------------------------------------------------------------------------------


class _Engines:
    """The commands of `Front`. They pass requests to an engine in other processes."""

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


async def _serve(descriptor: int, engines_: _Engines) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    async for line in reader:
        words = json.loads(line)
        try:
            answer = await getattr(engines_, words.pop("do"))(**words)
        except Exception as error:  # the test checks the error
            traceback.print_exc()
            answer = {"error": type(error).__name__}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), _Engines(Path(sys.argv[2]), Path(sys.argv[3]))))
