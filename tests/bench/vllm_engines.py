"""Runs several vLLM engines in one process, which take turns in steps, and times the scheduler's hooks.

vLLM has one global variable for the worker's connector, so each engine sets the variable before a step.
"""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.cli.exits import CommandError

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the bench times the scheduler in this process
    "TORCHDYNAMO_DISABLE": "1",  # in a short run, compiling takes more time than compiled code saves
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer may have to compile its sampler, which greedy requests do not need
    "HF_HUB_OFFLINE": "1",
}

BLOCK = 32
WINDOW = 80
VOCABULARY = 64
_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": None,
}
HOST_BYTES = 1 << 28  # enough for all blocks of a bench, so that none is evicted
HOST_BYTES_ON_GPU = 20 << 30

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "has_pending_block_frees",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "take_events",
)
"""The hooks that the scheduler calls while the engine serves requests."""


_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class Step:
    """The measurements of one engine step.

    Args:
        requests: the number of scheduled requests.
        tokens: the number of computed tokens.
        hook_ns: the nanoseconds spent in hooks since the previous step.
        longest_ns: the processor time of the longest of these hooks, in nanoseconds.
    """

    requests: int
    tokens: int
    hook_ns: int
    longest_ns: int


class Rider:
    """A vLLM engine.

    Args:
        name: the connector's name.
        checkpoint: the model's folder.
        kv_transfer: vLLM's settings for the connector; None for no connector.
        running: the most requests that run at the same time.
        options: vLLM's options, which override the defaults of `_options`.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Path,
        kv_transfer: Mapping[str, Any] | None,
        running: int,
        **options: object,
    ) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.name = name
        self._place = kv_transfer_state
        self._place._KV_CONNECTOR_AGENT = None
        connector = {} if kv_transfer is None else {"kv_transfer_config": dict(kv_transfer)}
        self.llm: Any = LLM(str(checkpoint), **{**_options(running), **connector, **options})
        self._worker_connector = self._place._KV_CONNECTOR_AGENT
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._spent_ns = self._longest_ns = self._requests = self._tokens = 0
        self.outputs: Sequence[Any] = ()
        if self._scheduler.connector is not None:
            self._watch(self._scheduler.connector)

    @property
    def connector(self) -> Any:
        return self._scheduler.connector

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests or open copies."""
        return bool(self._scheduler.has_requests())

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """Add a request for `tokens` tokens for each prompt, and return the request ids."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = [f"{time.monotonic_ns()}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, wanted)
        return names

    def step(self) -> Step:
        """Run one step. If the step computed nothing, pause, as vLLM's server does while it waits for copies."""
        self._place._KV_CONNECTOR_AGENT = self._worker_connector
        self._requests = self._tokens = 0
        self.outputs = self.llm.llm_engine.step()
        if self.connector is not None and not self._tokens and self.is_busy:
            time.sleep(_PAUSE_S)
        step = Step(self._requests, self._tokens, self._spent_ns, self._longest_ns)
        self._spent_ns = self._longest_ns = 0
        return step

    def serve(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[float], float]:
        """Serve all prompts at the same time. Return the seconds to each prompt's first token, and until the end."""
        begun = time.perf_counter()
        names = self.ask(prompts, tokens)
        first: dict[str, float] = {}
        while self.is_busy:
            self.step()
            now = time.perf_counter() - begun
            for output in self.outputs:
                first.setdefault(output.request_id, now)
        return [first[name] for name in names], time.perf_counter() - begun

    def abort(self, names: Sequence[str]) -> None:
        self.llm.llm_engine.abort_request(list(names))

    def follow(self, make: Callable[[Any, Any], Any], ended: Callable[[Any], Any]) -> None:
        """Time a connector's scheduler side beside this engine, which must have no connector.

        The scheduler side receives each request and plans in each step, but the engine ignores its hits and plans.

        Args:
            make: creates the scheduler side from vLLM's configuration and the KV cache's configuration.
            ended: returns, for a plan, a workers' report in which all copies have ended.
        """
        scheduler = self._scheduler
        side = make(self.llm.llm_engine.vllm_config, scheduler.kv_cache_config)
        build, update = self._timed(side.build_connector_meta), self._timed(side.update_connector_output)
        add, schedule = scheduler.add_request, scheduler.schedule

        def added(request: Any) -> None:
            add(request)
            side.on_new_request(request)
            side.get_num_new_matched_tokens(request, 0)

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._note(output)
            update(ended(build(output)))
            return output

        scheduler.add_request, scheduler.schedule = added, scheduled

    def close(self) -> None:
        self._place._KV_CONNECTOR_AGENT = self._worker_connector
        self.llm.llm_engine.engine_core.shutdown()
        self._place._KV_CONNECTOR_AGENT = None

    def _watch(self, connector: Any) -> None:
        for name in HOOKS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(getattr(connector, name)))
        build = connector.build_connector_meta

        def noting(output: Any) -> Any:
            self._note(output)
            return build(output)

        connector.build_connector_meta = noting

    def _note(self, output: Any) -> None:
        self._requests = len(output.num_scheduled_tokens)
        self._tokens = output.total_num_scheduled_tokens

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            of_thread, began = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                self._spent_ns += time.perf_counter_ns() - began
                self._longest_ns = max(self._longest_ns, time.thread_time_ns() - of_thread)

        return timed


def require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise CommandError("this bench runs on vLLM, which is not installed in this environment")


OURS, PEER, NATIVE = "kvoffload", "peer", "native"


def find_connectors() -> tuple[dict[str, dict[str, Any]], str]:
    """Prepare the process for vLLM. Return the connectors' settings by name, and a description of the peer.

    Without a GPU, the peer copies within host memory.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    prepare_process(on_gpu)
    if on_gpu:
        size = HOST_BYTES_ON_GPU
        ours = kv_transfer("KVOffloadConnector", host_bytes=size)
        peer = kv_transfer("SimpleCPUOffloadConnector", cpu_bytes_to_use=size)
        return {OURS: ours, PEER: peer}, "SimpleCPUOffloadConnector as vLLM ships it"
    from tests.vllm.stock import peer as on_host

    ours = kv_transfer("KVOffloadConnector", host_bytes=HOST_BYTES)
    note = "SimpleCPUOffloadConnector, its copies replaced by tests.vllm.stock.peer"
    return {OURS: ours, PEER: on_host.kv_transfer(HOST_BYTES)}, note


@contextmanager
def open_riders(
    model: str,
    connectors: Mapping[str, Mapping[str, Any] | None],
    running: int,
    shape: Mapping[str, Any] | None = None,
    **options: object,
) -> Iterator[list[Rider]]:
    """Run one engine per connector, all with the same tiny model, during the `with` block.

    Args:
        model: "qwen3" or "gemma3".
        connectors: vLLM's settings for each connector, by name; None for no connector.
        running: the most requests that run at the same time in an engine.
        shape: entries of the model's configuration, which replace the defaults.
        options: vLLM's options, which override the defaults.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint, riders = _write_checkpoint(model, Path(folder), shape or {}), []
        for name, connector in connectors.items():
            riders.append(Rider(name, checkpoint, connector, running, **options))
            stack.callback(riders[-1].close)
        yield riders


def draw_prompts(draw: random.Random, count: int) -> list[list[int]]:
    return [draw.choices(range(2, VOCABULARY), k=draw.randrange(64, 128)) for _ in range(count)]


def kv_transfer(connector: str, **extra: object) -> dict[str, Any]:
    """Return vLLM's settings for a connector.

    Args:
        connector: the connector's name in vLLM.
        extra: the connector's own settings.
    """
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def prepare_process(on_gpu: bool) -> None:
    """Set the environment variables that vLLM reads during its import."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not on_gpu:
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


def _write_checkpoint(kind: str, folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write the configuration of a tiny model, for which vLLM generates weights, and return the model's folder."""
    import transformers

    config: Any
    if kind == "qwen3":
        config = transformers.Qwen3Config(
            **{"num_hidden_layers": 1, "architectures": ["Qwen3ForCausalLM"], **_SHAPE, **shape}
        )
    else:
        # As in the real models, the layers need six KV cache groups.
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=len(layers),
            layer_types=layers,
            sliding_window=WINDOW,
            query_pre_attn_scalar=_SHAPE["head_dim"],
            architectures=["Gemma3ForCausalLM"],
            **_SHAPE,
        )
    config.save_pretrained(folder / kind)
    return folder / kind


def _options(running: int) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "compilation_config": {"custom_ops": ["none"]},
        "num_gpu_blocks_override": 8192,
        "kv_cache_memory_bytes": 1 << 28,
        "max_model_len": 512,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": running,
    }
