from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from kvoffload.model.wire import Direction, Tier
from kvoffload.telemetry.catalogue import TierState, tier_state
from tests.core.audit import audit_side
from tests.engine.tiny import assert_same
from tests.reference.rig import BLOCK, TOLERANCE, config_of, plain, text
from tests.reference.served import NEW_TOKENS, Served

PROMPT = text(1, 10 * BLOCK)
HOST_BLOCKS = 400
PATIENCE_S = 30.0


class Sharer(Served):
    """An engine that is connected to a real remote tier."""

    def __init__(
        self, url: str | None, kind: str = "full", *, ranks: int = 1, replicas: int = 1, **extra: object
    ) -> None:
        self.kind = kind
        settings = {"remote_url": url, "remote_timeout_s": 5.0, **extra} if url is not None else extra
        super().__init__(
            config_of(kind, ranks=ranks, replicas=replicas, host_blocks=HOST_BLOCKS, extra=settings)
        )

    @property
    def namespace(self) -> str:
        state = self.offload.state.asked
        assert state is not None
        return state.namespace

    def step_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, (self.tier, self.copies)
            self.engine.step()

    def run_until(self, prompts: Iterator[Sequence[int]], is_so: Callable[[], bool]) -> None:
        """Serve prompts until something is so: a call that times out on a busy machine closes the tier for a while."""
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, (self.tier, self.copies)
            self.run(next(prompts))
            pause = time.monotonic() + 1.0
            while not is_so() and time.monotonic() < pause:
                self.engine.step()

    def opened(self) -> Sharer:
        """Step until each rank has a connection and host memory, without which fetches are impossible."""
        state = self.offload.state.asked
        assert state is not None
        self.step_until(
            lambda: (
                state.is_usable and self.offload.gauges()["kvoffload_capacity_slots"]["host",] == HOST_BLOCKS
            )
        )
        return self

    def run(self, prompt: Sequence[int] = PROMPT) -> None:
        """Serve one request with an empty device cache, and check its tokens."""
        assert_same(self.answer(prompt), plain(self.kind, tuple(prompt), NEW_TOKENS), TOLERANCE)
        assert audit_side(self.offload) == []

    def share(self, prompt: Sequence[int] = PROMPT) -> None:
        """Serve a prompt twice, and wait until its nine full blocks are in the remote tier."""
        had = self.copied(Direction.STORE)
        self.run(prompt)
        self.run_until(repeat(prompt), lambda: self.copied(Direction.STORE) >= had + 9)

    def find(self, prompt: Sequence[int] = PROMPT) -> None:
        """Serve a prompt whose blocks another engine has shared; check that they are loaded."""
        had = self.copied(Direction.LOAD)
        self.run(prompt)
        assert self.copied(Direction.LOAD) > had

    @property
    def tier(self) -> TierState | None:
        return tier_state(self.offload, Tier.REMOTE)

    def until(self, state: TierState) -> None:
        self.step_until(lambda: self.tier is state)


StartEngine = Callable[..., Sharer]
