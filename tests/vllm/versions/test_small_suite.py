"""Scenes that must work on every version of vLLM. They are small enough to run on each version, and each has
a control.

In each scene, a part of the KV is loaded from the host, and the answers must equal those of an engine
without a connector. In the control, every load copies wrong bytes, which must change the answers.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvoffload.model.wire import Direction
from kvoffload.testing import GatedCopier
from kvoffload.testing.copier import GatedTicket
from tests.vllm.engine_rig import (
    MARKS,
    Asked,
    Held,
    Reported,
    Rig,
    check_same,
    offloading,
    plain,
    same,
)
from tests.vllm.stock import checkpoints
from tests.vllm.versions.test_refusals import is_refused

pytestmark = MARKS

WRONG = bytes([0x40, 0x41, 0x42, 0x3F])  # these bytes are numbers near 1, and values of KV are near 0


class Steered(GatedCopier):
    """Copies immediately. If the test asks for it, loads fail, or copy wrong bytes and report success."""

    def __init__(self) -> None:
        super().__init__(held=False)
        self.fails = False
        self.lies = False

    def submit(self, direction: Direction, runs: Any, fences: Sequence[Any]) -> GatedTicket:
        if direction is Direction.LOAD and self.fails and not self.lies:
            self.hold()
            ticket = super().submit(direction, runs, fences)
            ticket.fail()
            self._held = False
            return ticket
        ticket = super().submit(direction, runs, fences)
        if direction is Direction.LOAD and self.lies:
            for target, size in zip(runs.target, runs.size, strict=True):
                ctypes.memmove(int(target), WRONG * (int(size) // len(WRONG)), int(size))
        return ticket


@dataclass
class Stage:
    rig: Rig
    copier: Steered

    def put_on_host(self) -> None:
        """Store the blocks of all requests on the host, and remove them from the device."""
        self.copier.fails = False
        self.rig.forget()
        self.rig.run(REQUESTS)
        assert self.rig.scheduler.reset_prefix_cache()

    def loaded(self) -> int:
        return self.rig.counts.count("kvoffload_load_blocks_total", "loaded")


def _requests() -> dict[str, Asked]:
    draw = random.Random(5)
    stem = [draw.randrange(256) for _ in range(160)]
    asked = {}
    for number in range(10):
        tail = [draw.randrange(256) for _ in range(draw.randrange(20, 120))]
        asked[f"r{number}"] = Asked(tuple(stem[: 32 * (number % 6)] + tail), 24)
    return asked


REQUESTS = _requests()
DEVICE = {"num_gpu_blocks_override": 512, "max_model_len": 384}  # enough for all requests together


def reloaded(stage: Stage) -> dict[str, Reported]:
    stage.put_on_host()
    return stage.rig.run(REQUESTS)


def preempted(stage: Stage) -> dict[str, Reported]:
    """Run so many requests that vLLM preempts some of them."""
    stage.put_on_host()
    scheduler = stage.rig.scheduler
    with patch.object(scheduler, "_preempt_request", side_effect=scheduler._preempt_request) as taken_back:
        reported = stage.rig.run(REQUESTS)
    assert taken_back.call_count > 0
    return reported


def aborted(stage: Stage) -> dict[str, Reported]:
    """Abort some requests during their loads and others while they run. Return all other answers."""
    stage.put_on_host()
    for name, asked in REQUESTS.items():
        stage.rig.ask(name, asked)
    stage.rig.reported.clear()
    stage.rig.step()
    stage.rig.abort("r1", "r4")
    for _ in range(4):
        stage.rig.step()
    stage.rig.abort("r2", "r7")
    stage.rig.finish()
    gone = {"r1", "r2", "r4", "r7"}
    return {name: reported for name, reported in stage.rig.reported.items() if name not in gone}


def reset(stage: Stage) -> dict[str, Reported]:
    """Reset, and check that no earlier block is found. Return the answers of requests that load later blocks."""
    stage.put_on_host()
    assert stage.rig.connector.reset_cache()
    before = stage.loaded()
    longest = {"r5": REQUESTS["r5"]}
    assert stage.rig.run(longest)["r5"].cached == 0
    assert stage.loaded() == before
    stage.rig.run(REQUESTS)
    assert stage.rig.scheduler.reset_prefix_cache()
    return stage.rig.run(REQUESTS)


def failed(stage: Stage) -> dict[str, Reported]:
    """Let every load fail, so that the engine computes the tokens again."""
    stage.put_on_host()
    stage.copier.fails = True
    reported = stage.rig.run(REQUESTS)
    stage.copier.fails = False
    return reported


SCENES: tuple[Callable[[Stage], dict[str, Reported]], ...] = (reloaded, preempted, aborted, reset, failed)


@pytest.fixture(scope="module", params=checkpoints.KINDS)
def stage(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Stage, Mapping[str, Reported]]]:
    kind = request.param
    if is_refused(kind):
        pytest.skip("refused at start")  # another test in this folder checks the refusal
    with plain(kind, folder, **DEVICE) as rig:
        expected = rig.run(REQUESTS)
    held = Held(copier=Steered())
    device: dict[str, Any] = {
        "num_gpu_blocks_override": {"qwen3": 24, "gemma3": 44}[kind],
        "max_model_len": 384,
    }
    with offloading(kind, folder, 512, held=held, **device) as rig:
        assert isinstance(held.copier, Steered)
        yield Stage(rig, held.copier), expected


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene(
    stage: tuple[Stage, Mapping[str, Reported]], scene: Callable[[Stage], dict[str, Reported]]
) -> None:
    on, expected = stage
    on.copier.lies = False
    before = on.rig.counts
    reported = scene(on)
    check_same(reported, expected)
    gained = on.rig.counts.minus(before)
    outcome = "failed" if scene is failed else "loaded"
    assert gained.count("kvoffload_load_blocks_total", outcome) > 0
    on.rig.check_clean()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_control(
    stage: tuple[Stage, Mapping[str, Reported]], scene: Callable[[Stage], dict[str, Reported]]
) -> None:
    """Check that wrong bytes change an answer. Loads report success."""
    on, expected = stage
    on.copier.lies = True
    reported = scene(on)
    assert not all(same(one, expected[name]) for name, one in reported.items())
    on.copier.lies = False
    on.rig.finish()
    on.rig.forget()  # the device's blocks are wrong, too
