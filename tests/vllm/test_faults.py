"""Faults on a stock vLLM that other files do not test: forks, a dead event loop, and new weights."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_rig import (
    MARKS,
    Asked,
    Hands,
    Held,
    offloading,
    prompt,
    same,
    start_loading,
    truth,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hands]:
    held = Held()
    journal = {"journal_path": str(tmp_path_factory.mktemp("journal") / "journal")}
    with offloading("qwen3", folder, held=held, extra=journal) as rig:
        yield rig, held


def retrain(model: Any, factor: float) -> None:
    """Multiply half of each weight matrix in place. Calling this again with the reciprocal restores the
    weights.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data[: parameter.shape[0] // 2] *= factor


@pytest.mark.parametrize("in_flight", ["nothing", "a store", "a load"])
def test_after_a_reset_answers_are_those_of_the_new_weights(hands: Hands, in_flight: str) -> None:
    rig, held = hands
    asked = Asked(prompt(30), 8)
    rig.put_on_host_only(asked.prompt)
    old = rig.run({"old": asked})["old"]
    assert rig.scheduler.reset_prefix_cache()
    if in_flight == "a load":
        start_loading(hands, asked)
        rig.abort("a")
    elif in_flight == "a store":
        held.copier.hold()
        rig.ask("s", Asked(prompt(31), 2))
        rig.until(partial(rig.is_done, "s"))
        rig.until(lambda: held.stores)
    rig.llm.apply_model(partial(retrain, factor=2.0))
    try:
        answer = rig.scheduler.reset_prefix_cache(reset_connector=True)
        assert answer is (in_flight == "nothing")  # vLLM cannot reset its own cache while blocks are leased
        assert not rig.side.core.state.pool.index
        held.copier.release()
        rig.finish()
        assert rig.scheduler.reset_prefix_cache(reset_connector=True)
        right = truth(rig, asked, "new weights")
        assert not same(old, right)
        assert same(rig.run({"new": asked})["new"], right)
        assert rig.scheduler.reset_prefix_cache()
        again = rig.run({"again": asked})["again"]
        assert again.cached > 0
        assert same(again, right)
    finally:
        held.copier.release()
        rig.finish()
        rig.llm.apply_model(partial(retrain, factor=0.5))
        rig.forget()


def test_the_connector_can_be_imported_twice_and_forked_during_a_load(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process has none of the worker's threads, and must start new ones."""
    rig, held = hands
    asked = Asked(prompt(44), 6)
    expected = truth(rig, asked)
    start_loading(hands, asked)
    (point,) = [one for one in metadata.entry_points(group="vllm.general_plugins") if one.name == "kvoffload"]
    point.load()()
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvoffload_vllm"]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("kvoffload_vllm.connector").KVOffloadConnector is not type(rig.connector)
    point.load()()
    monkeypatch.undo()

    async def answer() -> int:
        return os.getpid()

    portal = rig.worker_connector.offload._portal
    child = os.fork()
    if child == 0:
        os._exit(0 if portal.spawn(answer).result(30) == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert portal.spawn(answer).result(30) == os.getpid()
    held.copier.release()
    rig.until(partial(rig.is_done, "a"))
    assert same(rig.reported["a"], expected)
    assert rig.reported["a"].cached > 0


def test_if_the_workers_event_loop_dies_loads_still_work(hands: Hands) -> None:
    """The hooks start loads, so only stores fail. This test must be the last in this file."""
    rig, _ = hands
    asked, other = Asked(prompt(41), 6), Asked(prompt(42), 6)
    expected = truth(rig, asked)
    right = truth(rig, other)
    rig.put_on_host_only(asked.prompt)
    loop, thread = rig.worker_connector.offload._portal._loop_thread
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    before = rig.counts
    reported = rig.run({"a": asked, "b": other})
    assert same(reported["a"], expected)
    assert same(reported["b"], right)
    assert reported["a"].cached > 0
    gained = rig.counts.minus(before)
    assert gained.count("kvoffload_load_blocks_total", "loaded") > 0
    assert gained.count("kvoffload_store_blocks_total", "failed") > 0
    assert rig.side.core.state.degraded is None
