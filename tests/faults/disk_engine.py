"""A program that runs engines with a disk tier, for tests of failing disks.

It reads commands from standard input, one per line, as JSON: `[name, arguments, settings]`. It answers each
with a line of JSON. All engines serve the same prompts. If a request's tokens differ from those of an engine
without offloading, the program ends.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kvoffload.core.machine import SlotState
from kvoffload.engine import Engine, SamplingParams, Token
from tests.core.audit import audit_side
from tests.core.below import disk_of
from tests.engine.tiny import assert_same, taken, tiny_config
from tests.reference.rig import BLOCK, LAYERS, TOLERANCE, config_of, slot_bytes, text
from tests.reference.served import NEW_TOKENS, Served

PROMPTS = [text(seed, 8 * BLOCK) for seed in range(4)]
HEAD_DIM = 8
LONG_HEAD_DIM = 1024  # its pages have 64 KiB, enough to be written and read without a buffer
_PATIENCE_S = 20.0


class Driven:
    def start(
        self,
        folder: str,
        *,
        ranks: int = 1,
        timeout_s: float = 30.0,
        opens_in_s: float = _PATIENCE_S,
        head_dim: int = HEAD_DIM,
    ) -> dict[str, Any]:
        """Start an engine, and wait until host memory is ready and the disk was opened or refused."""
        self.head_dim = head_dim
        size = slot_bytes("full", ranks) // HEAD_DIM * head_dim
        files = {"disk_path": folder, "disk_bytes": ranks * (4096 + 60 * (size + 4096)), "disk_min_hits": 1}
        extra = {"host_bytes": ranks * 40 * size, **files}
        config = config_of("full", ranks=ranks, timeout_s=timeout_s, extra=extra)
        config = replace(config, model=replace(config.model, head_dim=head_dim))
        self.served = Served(config)
        self.engine, self.offload = self.served.engine, self.served.offload
        state, until = self.offload.core.state, time.monotonic() + opens_in_s
        disk = disk_of(state)
        while not (state.pool.capacity and (disk.is_open or disk.is_closed)) and time.monotonic() < until:
            self.engine.step()
            time.sleep(0.001)
        return self.state()

    def serve(self, *numbers: int) -> dict[str, Any]:
        """Serve prompts, each with an empty device cache. Return the engine's state."""
        for number in numbers:
            until = time.monotonic() + _PATIENCE_S
            while not self.engine.pool.reset_prefix_cache():  # a store may still be reading blocks
                assert time.monotonic() < until
                self.engine.step()
            assert_same(self.served.answer(PROMPTS[number]), _plain(self.head_dim, number), TOLERANCE)
        return self.state()

    def state(self) -> dict[str, Any]:
        assert audit_side(self.offload) == []
        assert self.offload.degraded is None
        disk = disk_of(self.offload.state)
        return {
            "copies": {
                f"{way.value} {end.value}": blocks for (way, end), blocks in self.served.copies.items()
            },
            "blocks": len(disk.pool.index),
            "is_usable": disk.is_usable,
            "fetching": disk.fetching,
            "abandoned": self.offload.core.state.pool.count(SlotState.QUARANTINED),
        }

    def close(self) -> dict[str, Any]:
        self.engine.close()
        return {}


@cache
def _plain(head_dim: int, number: int) -> list[Token]:
    """Return the answer of an engine without offloading."""
    config = tiny_config("full", model={"layers": LAYERS["full"], "head_dim": head_dim})
    engine = Engine(config, clock=time.monotonic)
    stream = engine.submit(PROMPTS[number], SamplingParams(NEW_TOKENS))
    while engine.has_work:
        engine.step()
    return taken(stream)


def main() -> None:
    torch.set_num_threads(1)
    driven = Driven()
    for line in sys.stdin:
        name, arguments, settings = json.loads(line)
        sys.stdout.write(json.dumps(getattr(driven, name)(*arguments, **settings)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
