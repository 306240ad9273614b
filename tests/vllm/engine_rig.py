"""Runs a stock vLLM with the connector in this process, so that tests can use the engine, both sides and all
copies.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvoffload.core.machine import SlotState
from kvoffload.model.ids import SlotId
from kvoffload.runtime.copies import NO_ANSWERS
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.telemetry.counters import Snapshot
from kvoffload.testing import FakeClock, GatedCopier
from kvoffload.transfer.ports import Clocks
from tests.conservation import conservation
from tests.core.audit import audit_side
from tests.vllm.stock import checkpoints, engines

_SLOWER = 5 if engines.IS_V2_RUNNER else 1  # the V2 runner's kernels are interpreted, which is slow
MARKS = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300 * _SLOWER),
    pytest.mark.filterwarnings("ignore"),
]

SLOT_BYTES = 32768  # the size of a block in both attention models
DEVICE_BLOCKS = {  # Enough blocks for any single request, but too few for all requests together.
    "qwen3": 40,
    "gemma3": 72,
    "lfm2": 90,
    "granite4": 60,
    "qwen3_next": 60,
}
PUBLISHING: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
"""The option of an engine that publishes events about blocks. `Rig.published` collects them."""

_PATIENCE_S = 150.0 * _SLOWER
"""How long an engine may step, in CPU time, so that a busy machine does not count. pytest's time limit ends a wait."""


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    count: int = 8
    salt: str | None = None
    prompt_logprobs: bool = False


@dataclass
class Reported:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    cached: int
    finished: bool


def prompt(seed: int, length: int = 264) -> tuple[int, ...]:
    """Return a random prompt, by default with eight whole blocks and some more tokens."""
    draw = random.Random(seed)
    return tuple(draw.randrange(256) for _ in range(length))


def truth(rig: Rig, one: Asked, salt: str = "truth") -> Reported:
    """Compute a request without reading a cache; return the answer. The salt keeps its blocks from other requests."""
    asked = Asked(one.prompt, one.count, salt=salt, prompt_logprobs=True)
    return rig.run({"truth": asked})["truth"]


def truths(rig: Rig, asked: Mapping[str, Asked]) -> dict[str, Reported]:
    """Compute these requests without reading a cache, empty all caches, and return the answers."""
    answers = {name: truth(rig, one) for name, one in asked.items()}
    rig.forget()
    return answers


def transfer_config(host_blocks: int, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "kvoffload_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": host_blocks * SLOT_BYTES, **extra},
    }


@dataclass
class Rig:
    """An engine in this process. The test runs its steps, and gives each request a name."""

    llm: Any
    reported: dict[str, Reported] = field(default_factory=dict)
    unstable: frozenset[int] = frozenset()
    """The memory regions whose bytes on device and host may differ (`check_bytes`)."""

    # -- the parts ----------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        return engines.scheduler_of(self.llm)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """Our connector on the scheduler's side. vLLM may run several connectors."""
        return _ours(self.scheduler.connector)

    @property
    def side(self) -> SchedulerSide:
        side: SchedulerSide = self.connector.offload
        return side

    @property
    def worker_connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return _ours(get_kv_transfer_group())

    @property
    def pump(self) -> Any:
        return self.worker_connector.offload.pump

    @property
    def counts(self) -> Snapshot:
        return self.side.counters.snapshot()

    def slots(self, state: SlotState) -> int:
        return self.side.core.state.pool.count(state)

    def ready_slots(self) -> list[SlotId]:
        """Return the host slots whose blocks can be found."""
        pool = self.side.core.state.pool
        return [slot for slot in map(SlotId, range(pool.capacity)) if pool.state(slot) == SlotState.READY]

    # -- requests -----------------------------------------------------------------------------------------------

    def ask(self, name: str, asked: Asked, *, lora_request: Any = None, **sampling: Any) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=asked.count,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if asked.prompt_logprobs else None,
            **sampling,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(asked.prompt)}
        if asked.salt is not None:
            prompt["cache_salt"] = asked.salt
        self.llm.llm_engine.add_request(name, prompt, params, lora_request=lora_request)

    def abort(self, *names: str) -> None:
        self.llm.llm_engine.abort_request(list(names))

    def is_done(self, name: str) -> bool:
        return name in self.reported and self.reported[name].finished

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            self.reported[output.request_id] = _reported(output)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.process_time() + _PATIENCE_S
        while not condition():
            assert time.process_time() < deadline, "it does not come about"
            self.step()

    def run(
        self, asked: Mapping[str, Asked], then: Callable[[int], None] | None = None
    ) -> dict[str, Reported]:
        """Submit all requests, and step until they end. Return the answers. Before each step, call `then`
        with the step's number.
        """
        for name, one in asked.items():
            self.ask(name, one)
        self.finish(then)
        return {name: self.reported[name] for name in asked if name in self.reported}

    def finish(self, then: Callable[[int], None] | None = None) -> None:
        """Step until the engine has no requests and no open copies."""
        deadline, number = time.process_time() + _PATIENCE_S, 0
        while self.scheduler.has_requests():
            assert time.process_time() < deadline, f"the engine still has {list(self.scheduler.requests)}"
            if then is not None:
                then(number)
            self.step()
            number += 1

    def put_on_host_only(self, *prompts: Sequence[int]) -> None:
        """Compute prompts, wait for their stores, and empty the device's cache."""
        self.run({f"w{number}": Asked(tuple(prompt), 1) for number, prompt in enumerate(prompts)})
        assert self.scheduler.reset_prefix_cache()

    def forget(self) -> None:
        """Empty the caches of device and host. No request may be running."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)

    @contextmanager
    def expect_preemption(self) -> Iterator[None]:
        """Check that vLLM preempts a request during the `with` block."""
        preempt = self.scheduler._preempt_request
        with patch.object(self.scheduler, "_preempt_request", side_effect=preempt) as preempted:
            yield
        assert preempted.call_count > 0

    @contextmanager
    def published(self) -> Iterator[list[Any]]:
        """Collect the batches of events that an engine with `PUBLISHING` publishes during the `with` block."""
        batches: list[Any] = []
        with patch.object(self.scheduler.kv_event_publisher, "publish", side_effect=batches.append):
            yield batches

    def check_clean(self) -> None:
        """Check that no block is in use, no request is recorded, and all invariants hold. If the only worker is
        in this process, also check that device and host have equal bytes.
        """
        self.finish()
        assert engines.held_blocks(self.llm) == 0
        assert audit_side(self.side) == []
        assert conservation(self.counts, drained=True) == []
        state = self.side.core.state
        assert state.degraded is None
        assert not state.requests.live.values()
        assert not state.requests.finishing
        assert not state.jobs.open.values()
        assert not self.connector._tracked
        assert self.side.copies.answers is NO_ANSWERS
        assert not self.scheduler.requests
        if self.llm.llm_engine.vllm_config.parallel_config.world_size == 1:
            assert not self.worker_connector._loading
            self.check_bytes()

    def check_bytes(self) -> None:
        """Check that device and host have equal bytes for every block that both have.

        An attention block of a tail is left out, because its request has written more tokens to it.
        """
        pool, device, arena = self.side.core.state.pool, self.side.core.state.device, self.pump._arena
        state_bytes = self._state_bytes()
        for key, slot in pool.index.items():
            block = device.block_of(key)
            if block is None or (key[-4:] not in state_bytes and self._is_in_tail(key, block)):
                continue
            for number, region in enumerate(arena.layout.regions):
                if number in self.unstable:
                    continue
                start = region.address + block * region.block_stride
                size = state_bytes.get(key[-4:], region.page_bytes)
                ours = np.frombuffer(arena.pages(slot)[number], np.float32)[: size // 4]
                theirs = np.frombuffer((ctypes.c_ubyte * size).from_address(start), np.float32)
                assert np.allclose(ours, theirs, atol=1e-4, rtol=1e-3), (slot, block)

    def _is_in_tail(self, key: bytes, number: int) -> bool:
        block = self.scheduler.kv_cache_manager.block_pool.blocks[number]
        return block.block_hash != key or bool(block.block_hash_num_tokens % self.side.shape.alignment)

    def _state_bytes(self) -> dict[bytes, int]:
        """Return the size of a layer's state in each recurrent group, by the suffix of the group's block keys.

        The rest of a page is padding.
        """
        specs = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
        return {
            number.to_bytes(4, "big"): sum(
                math.prod(shape) * dtype.itemsize
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            for number, spec in enumerate(specs)
            if hasattr(spec, "shapes")
        }


class Reports:
    """Collects the names of requests whose loads were reported to vLLM, as received or as failed."""

    def __init__(self, rig: Rig) -> None:
        self.received: list[str] = []
        self.failed: list[str] = []
        tell = rig.scheduler._update_from_kv_xfer_finished

        def listen(output: Any) -> None:
            self.received += [one.partition("-")[0] for one in output.finished_recving or ()]
            self.failed += [one.partition("-")[0] for one in output.failed_recving or ()]
            tell(output)

        self._patch = patch.object(rig.scheduler, "_update_from_kv_xfer_finished", side_effect=listen)

    def __enter__(self) -> Reports:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@dataclass
class Held:
    """The copier and the clock of an engine, which the test controls."""

    copier: GatedCopier = field(default_factory=lambda: GatedCopier(held=False))
    clock: FakeClock = field(default_factory=FakeClock)

    @property
    def loads(self) -> list[Any]:
        return [one for one in self.copier.open_tickets if one.direction.value == "load"]

    @property
    def stores(self) -> list[Any]:
        return [one for one in self.copier.open_tickets if one.direction.value == "store"]


Hands = tuple[Rig, Held]


def start_loading(hands: Hands, asked: Asked) -> Any:
    """Put a prompt only on the host, and start request "a", which loads it. Return the load, which is held."""
    rig, held = hands
    rig.put_on_host_only(asked.prompt)
    held.copier.hold()
    rig.ask("a", asked)
    rig.until(lambda: held.loads)
    (load,) = held.loads
    return load


@contextmanager
def offloading(
    kind: checkpoints.Kind,
    folder: Path,
    host_blocks: int = 256,
    *,
    held: Held | None = None,
    extra: Mapping[str, Any] | None = None,
    two_steps: bool = False,
    checkpoint: Path | None = None,
    **options: Any,
) -> Iterator[Rig]:
    """Run an engine with the connector during the `with` block.

    With `held`, the test controls the copies and the scheduler's clock. With `two_steps`, scheduling is
    asynchronous. With `checkpoint`, the engine runs this model instead of `kind`.
    """
    options = {
        "num_gpu_blocks_override": DEVICE_BLOCKS[kind],
        "kv_transfer_config": transfer_config(host_blocks, **(extra or {})),
        **options,
    }
    with pytest.MonkeyPatch.context() as patched:
        if held is not None:
            patched.setattr("kvoffload_vllm.assembly.WorkerSide", partial(WorkerSide, copier=held.copier))
            clocks = Clocks(monotonic=held.clock.monotonic)
            patched.setattr("kvoffload_vllm.assembly.SchedulerSide", partial(SchedulerSide, clocks=clocks))
        if two_steps:
            for name, value in engines.TWO_STEPS.items():
                patched.setenv(name, value)
        model = checkpoint or checkpoints.make(kind, folder / kind)
        with engines.in_process(model, **options) as llm:
            assert not two_steps or llm.llm_engine.vllm_config.max_concurrent_batches == 2
            _wait_for_host_memory()
            yield Rig(llm)
    check_threads_gone()


def check_threads_gone() -> None:
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    for thread in ours:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ours), ours


@contextmanager
def plain(kind: checkpoints.Kind, folder: Path, **options: Any) -> Iterator[Rig]:
    with engines.in_process(checkpoints.make(kind, folder / kind), **options) as llm:
        yield Rig(llm)


def corrupt_host(rig: Rig, position: int | None = None) -> None:
    """Overwrite all blocks that can be found on the host, or only the one at `position` in slot order."""
    slots = rig.ready_slots()
    for slot in slots if position is None else [slots[position]]:
        overwrite(rig.pump._arena, slot)


def overwrite(arena: Any, slot: SlotId) -> None:
    for page in arena.pages(slot):
        # as float32, these bytes are near 1, and KV values are near 0
        page[:] = bytes([0x40, 0x41, 0x42, 0x3F]) * (len(page) // 4)


def check_reloads(rig: Rig, serve: Callable[[], bool], blocks: int) -> None:
    """Check that requests get right answers with empty caches and from the host. As a control, check that wrong
    bytes on the host change an answer.

    Args:
        rig: the engine, with empty caches.
        serve: serves all requests; returns whether their answers are right.
        blocks: the minimum number of blocks that the requests must load.
    """
    assert serve()
    rig.check_clean()
    assert rig.scheduler.reset_prefix_cache()
    before = rig.counts
    assert serve()
    assert rig.counts.minus(before).count("kvoffload_load_blocks_total", "loaded") >= blocks
    rig.check_clean()
    corrupt_host(rig)
    assert rig.scheduler.reset_prefix_cache()
    assert not serve()
    rig.forget()


def same(reported: Reported, expected: Reported) -> bool:
    """Return whether two answers have equal tokens and nearly equal log-probabilities."""
    close = partial(pytest.approx, abs=1e-3)
    return (
        reported.tokens == expected.tokens
        and reported.logprobs == close(expected.logprobs)
        and (not reported.prompt_logprobs or reported.prompt_logprobs == close(expected.prompt_logprobs))
    )


def check_same(reported: Mapping[str, Reported], expected: Mapping[str, Reported]) -> None:
    different = [name for name, one in reported.items() if not same(one, expected[name])]
    assert not different, {name: (reported[name], expected[name]) for name in different}


def _wait_for_host_memory() -> None:
    """Wait until this process's worker has its host memory or was refused it. Before that, it stores no block."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    for one in getattr(group, "_connectors", [group]):
        if type(one).__name__ == "KVOffloadConnector":
            preparing = one.offload._tasks[0]
            assert not wait([preparing], _PATIENCE_S).not_done


def _ours(connector: Any) -> Any:
    for one in getattr(connector, "_connectors", [connector]):
        if type(one).__name__ == "KVOffloadConnector":
            return one
    raise AssertionError(connector)


def _reported(output: Any) -> Reported:
    best = output.outputs[0]
    chosen = [place[token].logprob for token, place in zip(best.token_ids, best.logprobs, strict=True)]
    asked = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False)
    prompt = [place[token].logprob for token, place in asked]
    return Reported(
        tuple(best.token_ids), tuple(chosen), tuple(prompt), output.num_cached_tokens or 0, output.finished
    )
