"""vLLM's part of `kvoffload gpu-check`: an engine that offloads to much host memory beside one that does not.

Both have the same model, whose weights vLLM makes up; on a GPU with CUDA graphs, because memory is pinned in the same
minute in which vLLM captures them. They decode the same prompts in turns, and the blocks that these fill are stored
meanwhile. Then vLLM's own cache is reset, and the last prompts are found on the host.
"""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.gpu_check.parts import Line, NotHere, measured, ratios
from kvoffload.transfer.host_memory import available_bytes, read_file
from kvoffload_vllm.vllm_args import transfer_config

if TYPE_CHECKING:
    from kvoffload.gpu_check.parts import Options
    from kvoffload.runtime.scheduler_side import SchedulerSide

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in this process
    "TORCHDYNAMO_DISABLE": "1",  # nothing is worth compiling here
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
BLOCK = 32
VOCABULARY = 64
RUNNING = 32
PROMPT_TOKENS = 4 * BLOCK + 1
TOKENS = 4 * BLOCK
PAIRS = 6
_SPARE_BYTES = 8 << 30  # of host memory, for two engines
_PINNING_S = 240
_PAUSE_S = 0.001
ON_GPU: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "gpu_memory_utilization": 0.3,
}
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
}


def lines(options: Options) -> Iterator[Line]:
    """Yield the lines of a vLLM with this much host memory.

    Raises:
        NotHere: vLLM is not installed, the machine has too little memory, or torch sees no GPU.
    """
    check_machine(options)
    os.environ.update(ENVIRONMENT)
    host_bytes = options.host_gib << 30
    yield from measure(f"vLLM with host_bytes {options.host_gib}GiB", host_bytes, _SHAPE, ON_GPU)


def check_machine(options: Options) -> None:
    """Check that vLLM can run here on a GPU, with the host memory that the options name.

    Raises:
        NotHere: vLLM is not installed, the machine has too little memory, or torch sees no GPU.
    """
    if importlib.util.find_spec("vllm") is None:
        raise NotHere("vLLM is not installed")
    available = available_bytes(read_file)
    if available is not None and available < (options.host_gib << 30) + _SPARE_BYTES:
        raise NotHere(
            f"vLLM needs {options.host_gib} GiB and more, and the machine has {available / 2**30:.3g} GiB left"
        )
    import torch

    if not torch.cuda.is_available():
        raise NotHere("torch sees no GPU")


def measure(
    what: str, host_bytes: int, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Line]:
    """Start both engines and compare them.

    Args:
        what: begins each line.
        host_bytes: of the engine that offloads.
        shape: of the model.
        options: of the engines.
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
                if pair:  # the first warms up
                    found[engine].append(seconds)
        over = ratios(found[ours], found[plain])
        yield measured(f"{what}: a decoding step, over one without", over, "x", at_most=1.02)
        yield measured(f"{what}: a decoding step without", [1e3 * one for one in found[plain]], " ms")
        ours.llm.reset_prefix_cache()
        _, _, outputs = ours.serve(prompts, 1)
        tokens = sum(output.num_cached_tokens for output in outputs)
        text = f"{what}: tokens found on the host, of {RUNNING * PROMPT_TOKENS:,} that vLLM's cache had lost"
        yield measured(text, [tokens], at_least=1, is_check=True)


class Engine:
    """A vLLM in this process, with kvoffload's connector or without one.

    vLLM keeps the worker's connector in a variable of the process, so each engine puts its own there before a step.

    Args:
        model: folder of the model.
        settings: of kvoffload; None for no connector.
        options: of the engine.
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
        self._agent = self._place._KV_CONNECTOR_AGENT
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def offload(self) -> SchedulerSide:
        """Kvoffload's scheduler side. Only where the engine has one."""
        side: SchedulerSide = self.scheduler.connector.offload
        return side

    def serve(
        self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None = None
    ) -> tuple[float, float, list[Any]]:
        """Serve prompts, all at once, until nothing is left, open copies included.

        Returns:
            The seconds until each had its first token, those until the end, and vLLM's last output of each prompt.
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
            if not outputs:  # as the loop of vLLM's server, which rests while it waits for copies only
                time.sleep(_PAUSE_S)
        return max(first.values()), time.perf_counter() - begun, [last[name] for name in names]

    def fill_host_memory(self, timeout_s: float) -> None:
        """Serve until all host memory is ready, so that all blocks can be stored, or until the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.offload.core.state.growing and time.monotonic() < deadline:
            self.serve([[2] * 8], 8)

    def close(self) -> None:
        """End the engine."""
        self._place._KV_CONNECTOR_AGENT = self._agent
        self.llm.llm_engine.engine_core.shutdown()
        self._place._KV_CONNECTOR_AGENT = None


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write the configuration of a small model, whose weights vLLM makes up."""
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
    """Return the seconds of a step in which all decode."""
    first, seconds, _ = engine.serve(prompts, TOKENS)
    return (seconds - first) / (TOKENS - 1)


def _prompts(draw: random.Random) -> list[list[int]]:
    return [draw.choices(range(2, VOCABULARY), k=PROMPT_TOKENS) for _ in range(RUNNING)]
