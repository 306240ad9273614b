"""Runs mixed traffic on a stock vLLM in this process, in real time. Some copies fail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.tally import MissMemory
from kvoffload.transfer import host_copier
from kvoffload.transfer.runs import CopyRuns
from tests.core.audit import audit_side
from tests.soak.growth import Reading, read
from tests.vllm.engine_rig import DEVICE_BLOCKS, Asked, Rig, offloading
from tests.vllm.stock import checkpoints

_MODEL: checkpoints.Kind = "gemma3"  # a model with two groups: sliding windows and full attention
_PEOPLE = 6
_LONGEST = 420
_MISSES = 2000


class Talk:
    def __init__(self, made: Rig, choose: random.Random) -> None:
        self._made = made
        self._choose = choose
        self._histories: list[tuple[int, ...]] = [()] * _PEOPLE
        self._turn = 0
        self.answers = self.aborts = self.resets = 0

    def serve(self, seconds: float) -> None:
        """Serve for this many seconds, and then until no request and no copy is open."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._round()
            if self._choose.random() < 0.1:
                self.resets += bool(self._made.scheduler.reset_prefix_cache(reset_connector=True))
        self._made.finish()

    def _round(self) -> None:
        names = {}
        for number, history in enumerate(self._histories):
            if not history or len(history) > _LONGEST:
                history = tuple(random.Random(self._choose.randrange(2)).choices(range(256), k=70))
            said = tuple(self._choose.choices(range(256), k=self._choose.randint(10, 50)))
            self._histories[number] = (*history, *said)
            self._turn += 1
            names[number] = f"t{self._turn}"
            self._made.ask(names[number], Asked(self._histories[number], self._choose.randint(2, 10)))
        if self._choose.random() < 0.2:
            for _ in range(3):
                self._made.step()
            gone = self._choose.choice(list(names))
            self._made.abort(names[gone])
            self.aborts += 1
        self._made.finish()
        for number, name in names.items():
            reported = self._made.reported.pop(name, None)
            if reported is not None and reported.finished:
                self._histories[number] += reported.tokens
                self.answers += 1


def soak(
    seconds: float, apart_s: float, folder: Path, reported: Callable[[str], object]
) -> tuple[list[Reading], str]:
    """Run the soak for this many seconds; return one reading per `apart_s`, and a summary."""
    choose, readings = random.Random(1), list[Reading]()
    with pytest.MonkeyPatch.context() as patched:
        real = host_copier.choose_copy
        patched.setattr(host_copier, "choose_copy", lambda **how: _failing(real(**how), choose))
        options: dict[str, Any] = {"num_gpu_blocks_override": DEVICE_BLOCKS[_MODEL], "max_num_seqs": 16}
        with offloading(_MODEL, folder, 120, **options) as made:
            made.side.core.state.misses = MissMemory(_MISSES)
            talk, begun = Talk(made, choose), time.monotonic()
            while time.monotonic() - begun < seconds:
                talk.serve(apart_s)
                assert audit_side(made.side) == []
                readings.append(read(made.side.gauges()))
                reported(f"{(time.monotonic() - begun) / 60:.1f} minutes, {talk.answers} answers")
            made.check_clean()
            counts = made.counts
            words = (
                f"{seconds / 60:.0f} minutes on vLLM: {talk.answers} answers, {talk.aborts} aborts, "
                f"{talk.resets} resets, {counts.count('kvoffload_load_blocks_total', 'loaded')} blocks loaded, "
                f"{counts.count('kvoffload_load_blocks_total', 'failed')} of failed loads"
            )
    return readings, words


def _failing(copy: Callable[[CopyRuns], None], choose: random.Random) -> Callable[[CopyRuns], None]:
    """Make one copy in fifty fail halfway."""

    def fails(runs: CopyRuns) -> None:
        if choose.random() < 0.02:
            copy(CopyRuns(runs.source[:1], runs.target[:1], runs.size[:1]))
            raise OSError("the link is down")
        copy(runs)

    return fails
