"""Starts a small stock vLLM on a machine without a GPU, in this process or as a server.

Import this module before vLLM: it sets environment variables that vLLM reads when it is imported.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from kvoffload.remote.local import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from vllm import LLM

Foreign = Any  # vLLM is not installed where types are checked
AnyServer = TypeVar("AnyServer", bound="Server")

BLOCK = 32  # vLLM's CPU platform requires a multiple of 32 tokens

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_TARGET_DEVICE": "cpu",  # the wheel is built for CUDA, and this selects the CPU platform
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler's log-probabilities would take 20 s
    "OMP_NUM_THREADS": "1",  # the tensors are so small that more threads are slower
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # enables the route that resets the prefix cache
    "HF_HUB_OFFLINE": "1",
}

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

OPTIONS: Mapping[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "compilation_config": {"custom_ops": ["none"]},
    "num_gpu_blocks_override": 128,
    # Without this option, the worker requires nearly all of the machine's memory to be free.
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,  # longer prompts are computed in chunks
    "max_num_seqs": 16,
}

# Options of `serving` for tensor parallelism on a machine with one memory node and two cores.
TWO_WORKERS: Mapping[str, Any] = {
    "tensor_parallel_size": 2,
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
# tests/vllm/versions/matrix.py sets this variable.
IS_V2_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
# Environment variables that allow a KV cache with blocks outermost.
BLOCK_LAYOUTS: Mapping[str, str] = {"VLLM_CPU_OPS_BLOCK_LAYOUTS": "1"}
# Environment variables that enable asynchronous scheduling.
TWO_STEPS: Mapping[str, str] = {"VLLM_CPU_OPS_ASYNC_SCHEDULING": "1"}


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # the log-probabilities of the generated tokens
    cached: int  # how many prompt tokens were not computed


@contextmanager
def in_process(checkpoint: Path, **options: object) -> Iterator[LLM]:
    """Run an engine in this process during the `with` block, so that a test can use its scheduler and
    connector.

    Only one engine may exist at a time, because vLLM keeps the worker's connector in a global variable.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    # vLLM collects garbage seven times while an engine starts and ends. With all imported objects frozen,
    # this takes 0.1 s instead of 2 s. vLLM's own calls are replaced, because they would freeze the engine too
    # and later unfreeze everything.
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    with patch("gc.freeze"), patch("gc.unfreeze"):
        try:
            llm = LLM(str(checkpoint), **{**OPTIONS, "skip_tokenizer_init": True, **options})
        except Exception:
            # Otherwise the next engine would use the connector of the engine that failed to start.
            ensure_kv_transfer_shutdown()
            raise
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def cache_planning() -> Foreign:
    """Return vLLM's module that plans KV caches; before vLLM 0.33 `kv_cache_utils` did."""
    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils as kv_cache_planning
    return kv_cache_planning


def scheduler_of(llm: LLM) -> Foreign:
    """Return the scheduler of an engine in this process. Its `connector` is the connector's scheduler side."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def generate(llm: LLM, prompts: Sequence[Sequence[int]], count: int, **sampling: object) -> list[Answer]:
    """Generate `count` tokens greedily after each prompt, for all prompts concurrently."""
    from vllm import SamplingParams

    wanted = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0, **sampling
    )
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    done = llm.generate(asked, wanted, use_tqdm=False)
    return [_answer(output) for output in done]


def drain(llm: LLM, steps: int = 10_000) -> None:
    """Step until the engine has no work left. After `generate`, copies may still be open."""
    scheduler = scheduler_of(llm)
    for _ in range(steps):
        if not scheduler.has_requests():
            return
        llm.llm_engine.step()
    raise TimeoutError(f"the engine still had work after {steps} steps")


def held_blocks(llm: LLM) -> int:
    """Return how many device blocks are in use, not counting the null block."""
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def _answer(output: Foreign) -> Answer:
    best = output.outputs[0]
    chosen = zip(best.token_ids, best.logprobs, strict=True)
    logprobs = tuple(place[token].logprob for token, place in chosen)
    return Answer(tuple(best.token_ids), logprobs, output.num_cached_tokens or 0)


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.root = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.root + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Send `body` as JSON. Return the decoded answer, or an empty dict if the answer is empty."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, json.dumps(body or {}).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return dict(json.loads(text)) if text else {}

    def complete(self, prompt: Sequence[int] | str, count: int, **fields: object) -> dict[str, Any]:
        """Generate `count` tokens greedily through the OpenAI API; return the whole answer."""
        body = {"model": "small", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", {**body, "return_token_ids": True, **fields})

    def metric(self, name: str) -> float:
        """Return the sum of the metric's samples over all labels."""
        lines = [line.partition("#")[0].split() for line in self.get("/metrics").splitlines()]
        return sum(float(line[-1]) for line in lines if line and line[0].partition("{")[0] == name)

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server answers.

        Raises:
            TimeoutError: the server does not answer in time, or has ended. The error has the end of the
                server's log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise TimeoutError(f"the server is not ready; its last words:\n{self.log.read_text()[-4000:]}")

    def stop(self, seconds: float = 60) -> int:
        """Ask the server to end, or kill it after `seconds`. Return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kill the server and its workers, which share its process group, at once. Return its exit status."""
        os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


@contextmanager
def serving(
    checkpoint: Path, log: Path, *, environment: Mapping[str, str] | None = None, **options: object
) -> Iterator[Server]:
    """Run a `vllm serve` on a free port during the `with` block, and wait until it is ready.

    Underscores in the names of options become dashes.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    everything = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(environment or {})}
    # A start takes 15 s on an idle machine.
    named = {**OPTIONS, "served_model_name": "small", **options}
    with running(Server, command, named, log, everything, seconds=400) as server:
        yield server


@contextmanager
def running(
    kind: type[AnyServer],
    command: Sequence[str],
    options: Mapping[str, Any],
    log: Path,
    environment: Mapping[str, str],
    *,
    seconds: float,
) -> Iterator[AnyServer]:
    """Run a server on a free port during the `with` block. Wait at most `seconds` until it is ready."""
    port = free_port()
    words = [*command, *_arguments({"host": "127.0.0.1", "port": port, **options})]
    env = {**os.environ, **environment}
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        server = kind(process, port, log)
        try:
            server.wait_until_ready(seconds)
            yield server
        finally:
            server.stop()


def _arguments(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
