"""vLLM's speed check in `kvoffload gpu-check`: compares two vLLM engines, one with kvoffload and one without it.

Both engines run the same model with vLLM's dummy weights. One engine offloads to a large host memory. On a GPU both
engines use CUDA graphs, because vLLM captures graphs in the same minute in which kvoffload pins host memory. The
engines take turns to decode the same prompts, while kvoffload stores the blocks that its engine fills. One more round
of kvoffload's engine measures its hooks, and how often they wake the portal. Then the check resets vLLM's prefix cache
and requires the host to have blocks of the last prompts.
"""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.gpu_check.parts import Line, NotHere, measured, ratios
from kvoffload.model.config import size_text
from kvoffload.runtime.portal import BellLoop
from kvoffload.transfer.host_memory import available_bytes, read_file
from kvoffload_vllm.vllm_args import transfer_config

if TYPE_CHECKING:
    from kvoffload.gpu_check.parts import Options
    from kvoffload.runtime.scheduler_side import SchedulerSide

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the check reads the state of vLLM's scheduler in this process
    "TORCHDYNAMO_DISABLE": "1",  # in a short run, compiling takes more time than compiled code saves
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer may have to compile its sampler, which greedy requests do not need.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
BLOCK = 32
VOCABULARY = 64
RUNNING = 32
PROMPT_TOKENS = 4 * BLOCK + 1
TOKENS = 4 * BLOCK
PAIRS = 6
_SPARE_BYTES = 8 << 30  # the host memory that two engines take in addition to the memory for offloaded blocks
_PINNING_S = 240
_PAUSE_S = 0.001
ON_GPU: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "gpu_memory_utilization": 0.3,
}
_ONCE_A_STEP = "build_connector_meta"
_SCHEDULER_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    _ONCE_A_STEP,
    "update_connector_output",
    "request_finished_all_groups",
)
_WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
}


def lines(options: Options) -> Iterator[Line]:
    """Compare a vLLM engine without kvoffload to an engine with `options.host_bytes`, and yield the output lines.

    Raises:
        NotHere: vLLM is not installed, the machine has too little memory, or torch sees no GPU.
    """
    check_machine(options)
    os.environ.update(ENVIRONMENT)
    host_bytes = options.host_bytes
    yield from measure(f"vLLM with host_bytes {size_text(host_bytes)}", host_bytes, _SHAPE, ON_GPU)


def check_machine(options: Options) -> None:
    """Check that vLLM can run on this machine's GPU, and that `options.host_bytes` of host memory are available.

    Raises:
        NotHere: vLLM is not installed, the machine has too little memory, or torch sees no GPU.
    """
    if importlib.util.find_spec("vllm") is None:
        raise NotHere("vLLM is not installed")
    available = available_bytes(read_file)
    if available is not None and available < options.host_bytes + _SPARE_BYTES:
        raise NotHere(
            f"vLLM needs {size_text(options.host_bytes)} and more, and the machine has {size_text(available)} left"
        )
    import torch

    if not torch.cuda.is_available():
        raise NotHere("torch sees no GPU")


def measure(
    what: str, host_bytes: int, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Line]:
    """Start both engines, compare their decoding speed, and yield the output lines.

    Args:
        what: the prefix of each output line.
        host_bytes: the host memory that kvoffload uses, in bytes.
        shape: entries of the model's configuration, which replace the entries of `write_model`.
        options: vLLM's options for both engines.
    """
    draw = random.Random(0)
    begun = time.perf_counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder, shape)
        plain = Engine(folder, None, options)
        stack.callback(plain.close)
        ours = Engine(folder, {"host_bytes": host_bytes}, options)
        stack.callback(ours.close)
        yield measured(f"{what}: both engines have started after", [time.perf_counter() - begun], " s")
        yield from _ready(what, ours)
        found: dict[Engine, list[float]] = {plain: [], ours: []}
        for pair in range(PAIRS + 1):
            prompts = _prompts(draw)
            for engine in (plain, ours) if pair % 2 else (ours, plain):
                seconds = _decoding(engine, prompts)
                if pair:  # the first pair warms up the engines
                    found[engine].append(seconds)
        over = ratios(found[ours], found[plain])
        yield measured(f"{what}: a decoding step, over one without", over, "x", at_most=1.02)
        yield measured(f"{what}: a decoding step without", [1e3 * one for one in found[plain]], " ms")
        prompts = _prompts(draw)  # new ones, so that there are blocks to store
        yield from _hooks(what, ours, prompts)
        ours.llm.reset_prefix_cache()
        _, _, outputs = ours.serve(prompts, 1)
        tokens = sum(output.num_cached_tokens for output in outputs)
        text = f"{what}: tokens found on the host, of {RUNNING * PROMPT_TOKENS:,} that vLLM's cache had lost"
        yield measured(text, [tokens], at_least=1, is_check=True)


class Engine:
    """A vLLM engine in this process, with kvoffload's connector or without a connector.

    vLLM has one global variable for the worker's connector. So `serve` and `close` set the variable to this engine's
    connector.

    Args:
        model: the model's folder.
        settings: kvoffload's settings; None for no connector.
        options: vLLM's options.
    """

    def __init__(self, model: Path, settings: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._place: Any = kv_transfer_state
        self._place._KV_CONNECTOR_AGENT = None
        own = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "block_size": BLOCK,
            "num_gpu_blocks_override": RUNNING * (PROMPT_TOKENS + TOKENS) // BLOCK * 2,
            "kv_cache_memory_bytes": 1 << 28,
            "max_model_len": PROMPT_TOKENS + TOKENS,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": RUNNING,
            "kv_transfer_config": settings and transfer_config(settings),
        }
        self.llm: Any = LLM(str(model), **{**own, **options})
        self._agent = self.worker = self._place._KV_CONNECTOR_AGENT
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def offload(self) -> SchedulerSide:
        """The scheduler side of this engine's connector. An engine without kvoffload raises `AttributeError`."""
        side: SchedulerSide = self.scheduler.connector.offload
        return side

    def serve(
        self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None = None
    ) -> tuple[float, float, list[Any]]:
        """Serve all prompts at the same time, and wait until all requests and copies have ended.

        Returns:
            The seconds until every prompt had its first token, the seconds until all copies had ended, and each
            prompt's last `RequestOutput`.
        """
        from vllm import SamplingParams

        wanted = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self._place._KV_CONNECTOR_AGENT = self._agent
        begun = time.perf_counter()
        names = [f"{time.monotonic_ns()}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, wanted)
        first: dict[str, float] = {}
        last: dict[str, Any] = {}
        while self.scheduler.has_requests():
            outputs = self.llm.llm_engine.step()
            for output in outputs:
                first.setdefault(output.request_id, time.perf_counter() - begun)
                last[output.request_id] = output
            if not outputs:  # as vLLM's server does while no request can run
                time.sleep(_PAUSE_S)
        return max(first.values()), time.perf_counter() - begun, [last[name] for name in names]

    def fill_host_memory(self, timeout_s: float) -> None:
        """Serve short requests until kvoffload has prepared all host memory, or until the time limit."""
        deadline = time.monotonic() + timeout_s
        while self.offload.core.state.growing and time.monotonic() < deadline:
            self.serve([[2] * 8], 8)

    def close(self) -> None:
        self._place._KV_CONNECTOR_AGENT = self._agent
        self.llm.llm_engine.engine_core.shutdown()
        self._place._KV_CONNECTOR_AGENT = None


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write the `config.json` of a small model, but no weights.

    Args:
        folder: the folder to write to.
        shape: entries that replace or extend the default entries.
    """
    import transformers

    own = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
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
    transformers.Qwen3Config(**{**own, **shape}).save_pretrained(folder)


def _ready(what: str, ours: Engine) -> Iterator[Line]:
    begun = time.perf_counter()
    ours.fill_host_memory(_PINNING_S)
    seconds = time.perf_counter() - begun
    yield measured(f"{what}: host memory is ready, while it served, after", [seconds], " s")
    state = ours.offload.core.state
    slots = 0 if state.growing else state.pool.capacity
    yield measured(f"{what}: slots of the host", [slots], at_least=1, is_check=True)


def _decoding(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Return the mean time of a decoding step in seconds, measured after all prompts have their first token."""
    first, seconds, _ = engine.serve(prompts, TOKENS)
    return (seconds - first) / (TOKENS - 1)


@dataclass
class Spent:
    """The calls of some functions.

    Args:
        seconds: how long all calls took.
        calls: for each function, the number of calls.
    """

    seconds: float
    calls: dict[str, int]


def _hooks(what: str, engine: Engine, prompts: Sequence[Sequence[int]]) -> Iterator[Line]:
    """Decode the prompts, and yield what the connector's hooks cost in a step."""
    with ExitStack() as stack:
        scheduler = _timed(stack, engine.scheduler.connector, _SCHEDULER_HOOKS)
        worker = _timed(stack, engine.worker, _WORKER_HOOKS)
        wakes = _timed(stack, BellLoop, ("call_soon_threadsafe", "call_from_thread"))
        engine.serve(prompts, TOKENS)
    steps = scheduler.calls[_ONCE_A_STEP]
    yield measured(f"{what}: the scheduler's hooks in a step", [1e3 * scheduler.seconds / steps], " ms")
    yield measured(f"{what}: the worker's hooks in a step", [1e3 * worker.seconds / steps], " ms")
    yield measured(f"{what}: wakes of the portal in a step", [sum(wakes.calls.values()) / steps])


def _timed(stack: ExitStack, owner: Any, names: Sequence[str]) -> Spent:  # noqa: ANN401  # an object or a class
    """Measure the calls of the owner's functions until the stack is closed. Functions that are missing do not count."""
    spent = Spent(0.0, {})

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.seconds += time.perf_counter() - begun
                spent.calls[name] = spent.calls.get(name, 0) + 1

        return run

    for name in names:
        if function := getattr(owner, name, None):
            setattr(owner, name, timed(name, function))
            stack.callback(setattr, owner, name, function)
    return spent


def _prompts(draw: random.Random) -> list[list[int]]:
    return [draw.choices(range(2, VOCABULARY), k=PROMPT_TOKENS) for _ in range(RUNNING)]
