"""Engines on a disk below the host, driven by orders on standard input: run as a program, for tests that make its disk fail.

Each order is a line of JSON, `[name, arguments, settings]`, and its answer another one. All engines serve the same prompts; an answer that
differs from the plain engine's ends the program.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvoffload.engine import Engine, SamplingParams
from kvoffload.model.events import TierCopyEnded
from kvoffload_reference.plugin import ReferencePlugin
from tests.engine.tiny import assert_same, taken
from tests.reference.rig import BLOCK, TOLERANCE, config_of, plain, slot_bytes, text

PROMPTS = [text(seed, 8 * BLOCK) for seed in range(4)]
_NEW_TOKENS = 4


class Driven:
    """One engine at a time."""

    def start(
        self,
        folder: str,
        *,
        ranks: int = 1,
        blocks: int = 60,
        timeout_s: float = 30.0,
        opens_in_s: float = 20.0,
    ) -> dict[str, Any]:
        """Start one, and let it open its disk, if it can."""
        self.copies: dict[str, int] = {}
        self.plugin = ReferencePlugin()
        extra: dict[str, object] = {
            "disk_path": Path(folder),
            "disk_bytes_per_rank": 4096 + blocks * (slot_bytes("full", ranks) + 4096),
            "spill_after_hits": 1,
        }
        config = config_of("full", ranks=ranks, host_blocks=40, timeout_s=timeout_s, extra=extra)
        self.engine = Engine(config, self.plugin, clock=time.monotonic)
        assert self.plugin.offload is not None
        self.offload = self.plugin.offload
        self.offload.bus.count(TierCopyEnded, self._note)
        disk, until = self.offload.core.state.disk, time.monotonic() + opens_in_s
        assert disk is not None
        while not (disk.is_open or disk.is_closed) and time.monotonic() < until:
            self.engine.step()
            time.sleep(0.001)
        return self.state()

    def serve(self, *numbers: int) -> dict[str, Any]:
        """Serve prompts, each without anything on the device."""
        for number in numbers:
            assert self.engine.pool.reset_prefix_cache()
            stream = self.engine.submit(PROMPTS[number], SamplingParams(_NEW_TOKENS))
            while self.engine.has_work:
                self.engine.step()
            assert_same(taken(stream), plain("full", PROMPTS[number], _NEW_TOKENS), TOLERANCE)
        return self.state()

    def state(self) -> dict[str, Any]:
        assert self.offload.audit() == []
        assert self.offload._degradation.cause is None
        disk = self.offload.core.state.disk
        assert disk is not None
        return {
            "copies": self.copies,
            "blocks": len(disk.pool.index),
            "is_usable": disk.is_usable,
            "fetching": len(disk.fetching),
        }

    def close(self) -> dict[str, Any]:
        self.engine.close()
        return {}

    def _note(self, event: TierCopyEnded) -> None:
        what = f"{event.direction.value} {event.outcome.value}"
        self.copies[what] = self.copies.get(what, 0) + event.blocks


def main() -> None:
    torch.set_num_threads(1)
    driven = Driven()
    for line in sys.stdin:
        name, arguments, settings = json.loads(line)
        sys.stdout.write(json.dumps(getattr(driven, name)(*arguments, **settings)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
