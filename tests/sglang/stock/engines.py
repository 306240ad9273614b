"""Starts a small stock SGLang server with our storage backend, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload_sglang import settings as ours
from tests.sglang.stock.install import EXTENSIONS, PYTHON
from tests.vllm.stock import engines as vllm

PAGE = 16  # tokens per page
_TIMEOUT_S = 120
ADMIN = "of this test"  # SGLang only attaches a backend if the request has this key

ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # more threads do not help with tensors as small as these
    "HF_HUB_OFFLINE": "1",
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_ops.models",  # Without this, SGLang imports hundreds of models.
}

OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "enable_metrics": True,
    "enable_cache_report": True,
    "admin_api_key": ADMIN,
    "log_level": "info",
    "page_size": PAGE,
    "max_total_tokens": 1024,
    "context_length": 1024,
    "chunked_prefill_size": 512,
    "max_running_requests": 4,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}

BACKEND: Mapping[str, Any] = {**ours.BACKEND, "prefetch_threshold": PAGE, "disk_bytes": "16MiB"}


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    # Prompt tokens that were not computed, by where they were cached: device, host or storage.
    cached: Mapping[str, Any]
    seconds: float
    first_s: float  # seconds until the first token

    @property
    def stored(self) -> int:
        """The number of prompt tokens that were read from our tiers."""
        return int(self.cached.get("storage", 0))


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until the condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds} s"
        time.sleep(0.1)


class Server(vllm.Server):
    def send(self, method: str, path: str, body: Mapping[str, object] | None = None) -> tuple[int, str]:
        """Send `body` as JSON; return the status and the text of the answer."""
        try:
            with urllib.request.urlopen(self._request(method, path, body), timeout=_TIMEOUT_S) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def _request(self, method: str, path: str, body: Mapping[str, object] | None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"}
        data = json.dumps(body or {}).encode()
        return urllib.request.Request(self.root + path, data, headers, method=method)

    def generate(self, prompt: Sequence[int], count: int = 8) -> Answer:
        """Generate `count` tokens greedily after a prompt."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        request = self._request("POST", "/generate", body)
        first_s, event = 0.0, b""
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as lines:
            for line in lines:
                if line.startswith(b"data: {"):  # each event has all tokens so far
                    event = line
                    first_s = first_s or time.monotonic() - began
        seconds = time.monotonic() - began
        answer = json.loads(event.removeprefix(b"data: ") or "{}")
        # If the server is killed, its stream may end after any token without an error.
        if len(answer.get("output_ids", ())) < count:
            raise ConnectionError(f"the answer was cut off: {answer}")
        cached = answer["meta_info"]["cached_tokens_details"] or {}
        return Answer(tuple(answer["output_ids"]), cached, seconds, first_s)

    def attach(self, policy: str = "timeout", /, **settings: object) -> tuple[int, str]:
        """Attach our backend. `policy` is SGLang's policy for how long a request waits for storage."""
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps({**BACKEND, **settings}),
            "hicache_storage_prefetch_policy": policy,
        }
        return self.send("PUT", "/hicache/storage-backend", body)

    def detach(self) -> tuple[int, str]:
        return self.send("DELETE", "/hicache/storage-backend")

    def clear(self) -> tuple[int, str]:
        """Clear the storage backend, which begins a new generation."""
        return self.send("POST", "/hicache/storage-backend/clear")

    def has_logged(self, words: str) -> bool:
        """Return whether the log contains `words`. Our lines come from a separate thread and may be late."""
        return words in self.log.read_text()

    def flush(self) -> None:
        """Empty the caches of device and host."""
        wait_until(lambda: self.send("POST", "/flush_cache")[0] == 200)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics").splitlines() if line.partition("{")[0] == name]
        return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))

    def stop(self, seconds: float = 60) -> int:
        """Ask the server to exit, then kill what is still running; return the server's exit status."""
        try:
            return super().stop(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def serving(
    checkpoint: Path,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    storage: Mapping[str, object] | None = None,
    **options: object,
) -> Iterator[Server]:
    """Run an SGLang server on a free port during the `with` block, and wait until it is ready.

    Args:
        checkpoint: the model's folder.
        log: the file for the server's output.
        environment: additional environment variables.
        storage: our backend's settings; None starts the server without our backend.
        options: the server's arguments; underscores become dashes.
    """
    named = {**OPTIONS, "model_path": checkpoint, **options}
    if storage is not None:
        named["hicache_storage_backend"] = "dynamic"
        named["hicache_storage_backend_extra_config"] = json.dumps({**BACKEND, **storage})
    command = ["nice", str(PYTHON), "-m", "sglang.launch_server"]
    everything = {**ENVIRONMENT, **(environment or {})}
    with vllm.running(Server, command, named, log, everything, seconds=900) as server:
        yield server
