"""Runs an engine with the plugin as a program does: on real threads, with the real clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvoffload.engine import Engine, EngineConfig, SamplingParams, Token
from kvoffload.engine.runner import Runner
from kvoffload.model.causes import TierOutcome
from kvoffload.model.events import TierCopyEnded
from kvoffload.model.wire import Direction
from kvoffload.runtime.scheduler_side import SchedulerSide
from kvoffload_reference.plugin import ReferencePlugin
from tests.engine.tiny import taken

NEW_TOKENS = 4


class Served:
    """An engine that serves one request at a time, and counts the blocks that it copied from and to lower tiers."""

    def __init__(self, config: EngineConfig, make_runner: Callable[..., Runner] = Runner) -> None:
        self.plugin = ReferencePlugin()
        self.engine = Engine(config, self.plugin, clock=time.monotonic, make_runner=make_runner)
        self.copies = Counter[tuple[Direction, TierOutcome]]()
        self.offload.bus.count(TierCopyEnded, self._copied)

    def _copied(self, event: TierCopyEnded) -> None:
        self.copies[event.direction, event.outcome] += event.blocks

    def copied(self, way: Direction, outcome: TierOutcome = TierOutcome.DONE) -> int:
        return self.copies[way, outcome]

    @property
    def offload(self) -> SchedulerSide:
        assert self.plugin.offload is not None
        return self.plugin.offload

    def answer(self, prompt: Sequence[int]) -> list[Token]:
        """Serve one request with an empty device cache; return its tokens."""
        assert self.engine.pool.reset_prefix_cache()
        stream = self.engine.submit(prompt, SamplingParams(NEW_TOKENS))
        while self.engine.has_work:
            self.engine.step()
        return taken(stream)
