"""Measures a `vllm serve` that is killed and started again with host memory in files, beside one without a connector.

The first server serves some prompts and is killed. In each turn, a server without a connector and one with the killed
server's files start one after the other, and both serve the same prompts, one at a time. The server's own start ends
with the answer to a first, short prompt.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvoffload.checks.options import positive
from kvoffload.model.config import parse_bytes
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out
from tests.bench.vllm_engines import kv_transfer, require_vllm
from tests.vllm.stock import checkpoints, client, engines

TOKENS = 2048
_SHORT = (1, 2, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=positive, default=5, help="servers that start again")
    parser.add_argument("--prompts", type=positive, default=4, help="that return, of 2,048 tokens")
    parser.add_argument(
        "--host-bytes", type=parse_bytes, default=2**30, help="host memory, of which prompts fill a part"
    )
    parser.add_argument(
        "--path", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs (default: /dev/shm)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    require_vllm()
    method = f"{args.turns} starts of each server, in turns; medians [95 % interval]"
    with tempfile.TemporaryDirectory(dir=args.path) as files, tempfile.TemporaryDirectory() as work:
        config = kv_transfer("KVOffloadConnector", host_bytes=args.host_bytes, host_path=files)
        prompts = [random.Random(seed).choices(range(256), k=TOKENS) for seed in range(args.prompts)]
        return give_out("restart", args, method, lines(Path(work), config, prompts, args.turns), "vllm")


def lines(work: Path, config: dict[str, Any], prompts: Sequence[Sequence[int]], turns: int) -> Iterator[Line]:
    """Kill a server and start it again, beside one without a connector; yield what was measured.

    Raises:
        RuntimeError: a server that was started again has computed blocks of a prompt.
    """
    checkpoint = checkpoints.make("qwen3", work / "model", **checkpoints.LARGER)
    with _served(checkpoint, work, {"kv_transfer_config": config}) as (server, _):
        for prompt in prompts:
            client.stream(server, prompt, 8)
        client.settled(server)
        server.kill()
    starts, hits, computed, loaded = list[float](), list[float](), list[float](), list[float]()
    for _ in range(turns):
        with _served(checkpoint, work, {}) as (server, began):
            starts.append(time.monotonic() - began)
            computed += [client.stream(server, prompt, 8).first_token_s for prompt in prompts]
        with _served(checkpoint, work, {"kv_transfer_config": config}) as (server, began):
            replies = [client.stream(server, prompts[0], 8, partial(_note, hits, began))]
            replies += [client.stream(server, prompt, 8) for prompt in prompts[1:]]
            server.kill()
        if any(reply.cached_tokens < TOKENS - engines.BLOCK for reply in replies):
            raise RuntimeError(
                f"of the prompts, {[reply.cached_tokens for reply in replies]} tokens were found"
            )
        loaded += [reply.first_token_s for reply in replies]
    yield line(
        "from a start after a SIGKILL to the first hit, over the same server's start without a connector",
        ratios(hits, starts),
        at_most=1.2,
    )
    yield line(
        "first token of a prompt that returns after a SIGKILL: sooner than computed",
        ratios(computed, loaded),
        at_least=5,
    )


def _note(times: list[float], began: float) -> None:
    times.append(time.monotonic() - began)


@contextmanager
def _served(
    checkpoint: Path, work: Path, connector: dict[str, Any]
) -> Iterator[tuple[engines.Server, float]]:
    """Run a server that has answered once; yield it with the time when it was started."""
    options: dict[str, Any] = {
        "max_model_len": TOKENS + engines.BLOCK,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 3 * TOKENS // engines.BLOCK,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prompt_tokens_details": True,
        **connector,
    }
    began = time.monotonic()
    with engines.serving(checkpoint, work / "log", **options) as server:
        server.complete(_SHORT, 1)
        yield server, began
