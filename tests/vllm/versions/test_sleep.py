"""A stock vLLM sleeps and wakes with the connector, where it tells connectors of it.

The engine runs on a CPU, where vLLM itself does not sleep. So its worker gets the methods of vLLM's GPU worker, and a
sleep-mode backend that overwrites the KV memory when it takes it away, and again when it gives it back. The connector's
copies must not touch the memory in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.model.errors import CopyError
from kvoffload.testing.copier import GatedTicket
from kvoffload_vllm.support import find_features
from tests.vllm.engine_rig import MARKS, Asked, Hands, Held, Rig, offloading, prompt, same, truths

pytestmark = MARKS

AWAY, BACK = 0x7F, 0x3F  # as float32, these bytes change every answer
REQUESTS = {"a": Asked(prompt(1)), "b": Asked(prompt(2))}


class Backend:
    """A sleep-mode backend of vLLM that only overwrites the KV memory."""

    rig: Rig
    caches: dict[str, Any]

    def __init__(self) -> None:
        self.is_away = False
        self.slept: list[int] = []

    def suspend(self, level: int = 1) -> None:
        self.slept.append(level)
        self.discard(("kv_cache",))

    def discard(self, tags: Sequence[str]) -> None:
        self.is_away = True
        self._overwrite(AWAY)

    def resume(self, tags: Sequence[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            self._overwrite(BACK)
            self.is_away = False

    def _overwrite(self, byte: int) -> None:
        assert not self.rig.pump._lanes[0]
        for region in self.rig.pump._arena.layout.regions:
            ctypes.memset(region.address, byte, region.block_stride * region.blocks)


@contextmanager
def gpu_worker(backend: Backend) -> Iterator[None]:
    """Give vLLM's CPU worker what its GPU worker does to sleep and to wake."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    names = ("sleep", "wake_up", "discard")
    methods = {name: Worker.__dict__[name] for name in names}
    with (
        patch.object(type(current_platform), "is_sleep_mode_available", lambda self: True),
        patch.multiple(
            CPUWorker, **methods, sleep_mode_backend=backend, synchronize_device=lambda self: None
        ),
        patch.multiple(torch.accelerator, synchronize=lambda: None, get_memory_info=lambda: (0, 1)),
    ):
        yield


class SleepyRig:
    def __init__(self, hands: Hands, backend: Backend) -> None:
        self.rig, self.held = hands
        self.backend = backend
        self.expected = truths(self.rig, REQUESTS)

    def check(self, *, from_host: bool) -> None:
        """Serve the requests; check each answer, and whether its prompt came from the host."""
        answers = self.rig.run(REQUESTS)
        for name, answer in answers.items():
            assert same(answer, self.expected[name]), name
            assert (answer.cached > 0) is from_host, name


@pytest.fixture(scope="module")
def sleepy(folder: Path) -> Iterator[SleepyRig]:
    from kvoffload_vllm.connector import KVOffloadConnector

    if not find_features().announces_sleep:
        pytest.skip("this version does not tell connectors that it sleeps")
    held, backend = Held(), Backend()
    submit = held.copier.submit

    def checked(*arguments: Any) -> GatedTicket:
        assert not backend.is_away
        return submit(*arguments)

    register = KVOffloadConnector.register_kv_caches

    def noted(connector: KVOffloadConnector, caches: dict[str, Any]) -> None:
        backend.caches = caches
        register(connector, caches)

    with (
        gpu_worker(backend),
        patch.object(KVOffloadConnector, "register_kv_caches", noted),
        patch.object(held.copier, "submit", checked),
        offloading("qwen3", folder, held=held, enable_sleep_mode=True) as rig,
    ):
        backend.rig = rig
        yield SleepyRig((rig, held), backend)


@pytest.fixture(autouse=True)
def clean(sleepy: SleepyRig) -> Iterator[None]:
    sleepy.rig.reported.clear()
    sleepy.backend.slept.clear()
    yield
    sleepy.held.copier.release()
    sleepy.rig.check_clean()
    sleepy.rig.forget()


def store(sleepy: SleepyRig) -> None:
    sleepy.rig.run(REQUESTS)
    assert sleepy.rig.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_resets_the_host_with_each_sleep_and_fills_it_again(sleepy: SleepyRig, level: int) -> None:
    for _ in range(2):
        store(sleepy)
        sleepy.rig.llm.sleep(level=level)
        assert sleepy.backend.is_away
        sleepy.rig.llm.wake_up()
        sleepy.check(from_host=False)
        assert sleepy.rig.scheduler.reset_prefix_cache()
        sleepy.check(from_host=True)
    assert sleepy.backend.slept == [level, level]


def test_blocks_are_found_after_a_sleep_that_reset_only_the_device(sleepy: SleepyRig) -> None:
    store(sleepy)
    executor = sleepy.rig.core.model_executor
    executor.sleep(1)
    executor.wake_up(["weights"])
    assert sleepy.backend.is_away
    executor.wake_up(["kv_cache"])
    sleepy.check(from_host=True)


def test_memory_that_only_the_kv_cache_gives_up_comes_back(sleepy: SleepyRig) -> None:
    store(sleepy)
    sleepy.rig.llm.sleep(level=0)
    sleepy.rig.llm.release_kv_cache_memory()
    assert sleepy.backend.is_away
    sleepy.rig.llm.wake_up()
    sleepy.check(from_host=False)


def test_requests_that_are_kept_over_a_sleep_are_computed_again(sleepy: SleepyRig) -> None:
    for name, asked in REQUESTS.items():
        sleepy.rig.ask(name, asked)
    sleepy.rig.until(lambda: sleepy.rig.scheduler.running)
    sleepy.rig.step()
    sleepy.rig.until(lambda: not sleepy.rig.side.state.jobs.open)
    assert not sleepy.rig.reported or not all(map(sleepy.rig.is_done, REQUESTS))
    sleepy.rig.llm.sleep(level=1, mode="keep")
    sleepy.rig.llm.wake_up()
    sleepy.rig.finish()
    for name, expected in sleepy.expected.items():
        assert same(sleepy.rig.reported[name], expected)


def test_registering_again_keeps_the_host_memory_and_its_blocks(sleepy: SleepyRig) -> None:
    store(sleepy)
    executor, pump = sleepy.rig.core.model_executor, sleepy.rig.pump
    executor.sleep(1)
    executor.wake_up()
    sleepy.rig.worker_connector.register_kv_caches(sleepy.backend.caches)
    assert sleepy.rig.pump is pump
    sleepy.check(from_host=True)


def release_later(sleepy: SleepyRig) -> Timer:
    timer = Timer(0.2, sleepy.held.copier.release)
    timer.start()
    return timer


def test_a_store_that_runs_is_copied_before_the_memory_goes(sleepy: SleepyRig) -> None:
    sleepy.held.copier.hold()
    for name, asked in REQUESTS.items():
        sleepy.rig.ask(name, asked)
    sleepy.rig.until(lambda: all(map(sleepy.rig.is_done, REQUESTS)))
    sleepy.rig.until(lambda: sleepy.held.stores)
    timer = release_later(sleepy)
    sleepy.rig.core.model_executor.sleep(1)
    timer.join()
    sleepy.rig.core.model_executor.wake_up()
    sleepy.rig.finish()
    assert sleepy.rig.scheduler.reset_prefix_cache()
    sleepy.check(from_host=True)


def test_a_load_that_a_sleep_overtakes_is_recomputed(sleepy: SleepyRig) -> None:
    store(sleepy)
    sleepy.held.copier.hold()
    sleepy.rig.ask("a", REQUESTS["a"])
    sleepy.rig.until(lambda: sleepy.held.loads)
    timer = release_later(sleepy)
    sleepy.rig.core.model_executor.sleep(1)
    timer.join()
    sleepy.rig.core.model_executor.wake_up()
    sleepy.rig.finish()
    assert same(sleepy.rig.reported["a"], sleepy.expected["a"])


def test_vllm_does_not_sleep_in_one_process_while_a_store_leases_a_block(sleepy: SleepyRig) -> None:
    """An engine in its own process steps until no copy is open. This one must be stepped by its caller."""
    sleepy.held.copier.hold()
    sleepy.rig.ask("a", REQUESTS["a"])
    sleepy.rig.until(lambda: sleepy.rig.is_done("a"))
    sleepy.rig.until(lambda: sleepy.held.stores)
    assert sleepy.rig.scheduler.has_requests()
    with pytest.raises(RuntimeError, match="Failed to reset"):
        sleepy.rig.llm.sleep()
    assert not sleepy.backend.slept
    sleepy.held.copier.release()
    sleepy.rig.finish()
    sleepy.rig.llm.sleep()
    sleepy.rig.llm.wake_up()
    sleepy.check(from_host=False)


def test_a_copy_that_hangs_keeps_the_memory(sleepy: SleepyRig) -> None:
    sleepy.held.copier.hold()
    sleepy.rig.ask("a", REQUESTS["a"])
    sleepy.rig.until(lambda: sleepy.held.stores)
    with (
        patch.object(sleepy.rig.pump, "_timeout_s", 0.1),
        pytest.raises(CopyError, match="still use the KV cache"),
    ):
        sleepy.rig.core.model_executor.sleep(1)
    assert not sleepy.backend.is_away
    sleepy.held.copier.release()
    sleepy.rig.finish()
    assert same(sleepy.rig.reported["a"], sleepy.expected["a"])
