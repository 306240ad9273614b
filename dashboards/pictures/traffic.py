"""Runs two stock vLLM engines that serve conversations of several turns. Run this program with `.venv/vllm`'s Python.

The program prints the servers' addresses, and waits for a line on standard input. Then it plays conversations for the
given number of seconds, and serves metrics until a second line arrives. The model is small and has random weights, so
the answers mean nothing, but computing prompts takes real time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from tests.vllm.stock import checkpoints, client, engines

MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
CONNECTOR: dict[str, Any] = {
    "kv_connector": "KVOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": "48MiB"},
}
# An engine's conversations need about twice the blocks of the device's cache, and fit in host memory.
DEVICE_BLOCKS, CONVERSATIONS, AT_ONCE = 256, 8, 2
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS, LONGEST = 1024, 96, 16, 2800


def serve(seconds: float) -> None:
    """Start the engines, play conversations after a line on standard input, and stop after a second line."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-pictures-") as scratch, ExitStack() as stack:
        checkpoint = checkpoints.make("qwen3", Path(scratch) / "model", **MODEL)
        servers = [
            stack.enter_context(
                engines.serving(
                    checkpoint,
                    Path(scratch) / f"{number}.log",
                    num_gpu_blocks_override=DEVICE_BLOCKS,
                    max_model_len=checkpoints.CONTEXT,
                    kv_transfer_config=CONNECTOR,
                )
            )
            for number in range(2)
        ]
        for server in servers:  # an engine's first request takes longer than later requests
            client.stream(server, [1] * 2 * engines.BLOCK, ANSWER_TOKENS)
        print(json.dumps([server.root.removeprefix("http://") for server in servers]), flush=True)
        sys.stdin.readline()
        with ThreadPoolExecutor(len(servers) * AT_ONCE) as pool:
            until = time.monotonic() + seconds
            talks = [pool.submit(_talk, server, seed, until) for server in servers for seed in range(AT_ONCE)]
            try:
                for talk in talks:
                    talk.result()
            except BaseException:
                # Running conversations fail when their servers end.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        print("served", flush=True)
        sys.stdin.readline()


def _talk(server: engines.Server, seed: int, until: float) -> None:
    """Play turns of randomly chosen conversations, one turn at a time. A long conversation begins again."""
    draw = random.Random(f"{server.root} {seed}")
    prompts: Sequence[list[int]] = [[] for _ in range(CONVERSATIONS // AT_ONCE)]
    while time.monotonic() < until:
        prompt = draw.choice(prompts)
        if len(prompt) > LONGEST:
            prompt.clear()
        prompt += draw.randbytes(TURN_TOKENS if prompt else FIRST_TOKENS)
        prompt += client.stream(server, prompt, ANSWER_TOKENS).tokens


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # an exception, so that `serve` ends the servers
    parser = argparse.ArgumentParser(description="serve returning conversations with two stock vLLM engines")
    parser.add_argument("--seconds", type=float, required=True)
    serve(parser.parse_args().seconds)
