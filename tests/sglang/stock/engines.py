"""Starts a stock SGLang server on a machine without a GPU, with options that make it small and a storage backend of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.remote.local import free_port
from tests.sglang.stock.install import EXTENSIONS, PYTHON

PAGE = 16  # tokens
ADMIN = "of this test"  # the key without which SGLang attaches nothing

ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # the tensors are tiny: more threads cost more than they bring
    "HF_HUB_OFFLINE": "1",
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_ops.models",  # imports these models only
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

BACKEND: Mapping[str, Any] = {
    "backend_name": "kvoffload",
    "module_path": "kvoffload_sglang.storage",
    "class_name": "KVOffloadStorage",
    "interface_v1": 1,
    "prefetch_threshold": PAGE,
    "disk_bytes": "16MiB",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine made of one prompt."""

    tokens: tuple[int, ...]
    cached: Mapping[str, Any]  # prompt tokens that were not computed: device, host, storage
    seconds: float

    @property
    def stored(self) -> int:
        """Prompt tokens that came from our tiers."""
        return int(self.cached.get("storage", 0))


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    """Waits until something is so; raises where it takes longer."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.1)


class Server:
    """A running SGLang."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.root = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        """The body of what the server answers."""
        with urllib.request.urlopen(self.root + path, timeout=60) as answer:
            return str(answer.read().decode())

    def send(self, method: str, path: str, body: Mapping[str, object] | None = None) -> tuple[int, str]:
        """Sends `body` as JSON; returns the status and what comes back."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.root + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {ADMIN}")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, prompt: Sequence[int], count: int = 8) -> Answer:
        """Continues a prompt greedily."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        began = time.monotonic()
        status, text = self.send("POST", "/generate", body)
        seconds = time.monotonic() - began
        assert status == 200, text
        answer = json.loads(text)
        cached = answer["meta_info"]["cached_tokens_details"] or {}
        return Answer(tuple(answer["output_ids"]), cached, seconds)

    def attach(self, policy: str = "timeout", /, **settings: object) -> tuple[int, str]:
        """Attaches our backend with these settings; `policy` says how long a request waits for it."""
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps({**BACKEND, **settings}),
            "hicache_storage_prefetch_policy": policy,
        }
        return self.send("PUT", "/hicache/storage-backend", body)

    def detach(self) -> tuple[int, str]:
        """Detaches the storage backend."""
        return self.send("DELETE", "/hicache/storage-backend")

    def clear(self) -> tuple[int, str]:
        """Lets the storage backend forget everything."""
        return self.send("POST", "/hicache/storage-backend/clear")

    def words(self, word: str) -> list[str]:
        """The lines of the log with a word."""
        return [line for line in self.log.read_text().splitlines() if word in line]

    def flush(self) -> None:
        """Empties the device's and the host's cache."""
        wait_until(lambda: self.send("POST", "/flush_cache")[0] == 200)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over a metric's samples with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics").splitlines() if line.partition("{")[0] == name]
        return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))

    def wait_until_ready(self, seconds: float) -> None:
        """Returns when the server answers; raises, with the end of its log, where it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise TimeoutError(f"the server is not ready; its last words:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Ends all of the server's processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds: float = 60) -> None:
        """Asks the server to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def serving(
    checkpoint: Path,
    log: Path,
    *,
    seconds: float = 900,
    environment: Mapping[str, str] | None = None,
    storage: Mapping[str, object] | None = None,
    **options: object,
) -> Iterator[Server]:
    """Start an SGLang server on a free port, wait until it is ready, and stop it at the end of the block.

    Args:
        checkpoint: the model.
        log: file for what the server prints.
        seconds: the time limit for the start.
        environment: further variables.
        storage: settings of our backend, None to start without one.
        options: arguments of the server; underscores become dashes.
    """
    port = free_port()
    named: dict[str, Any] = {
        **OPTIONS,
        "model_path": checkpoint,
        "host": "127.0.0.1",
        "port": port,
        **options,
    }
    if storage is not None:
        named["hicache_storage_backend"] = "dynamic"
        named["hicache_storage_backend_extra_config"] = json.dumps({**BACKEND, **storage})
    command = ["nice", str(PYTHON), "-m", "sglang.launch_server", *_arguments(named)]
    everything = {**os.environ, **ENVIRONMENT, **(environment or {})}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=everything, start_new_session=True
        )
        server = Server(process, port, log)
        try:
            server.wait_until_ready(seconds)
            yield server
        finally:
            server.stop()


def _arguments(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)]
    return words
