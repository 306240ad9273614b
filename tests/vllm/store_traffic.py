"""Runs mixed traffic on two stock vLLMs that share a remote tier, with aborts, a reset, a restart and a kill.

Every answer must equal that of an engine without a connector. At the end, the audit must find no problem.

    python -m tests.vllm.store_traffic [qwen3 gemma3 lfm2] [--stores mooncake s3] [--seeds 1 2]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from itertools import product
from pathlib import Path
from unittest.mock import patch

from kvoffload.model.wire import Direction
from kvoffload.remote.local import LocalBucket, LocalMooncake
from tests.vllm.disk_traffic import conversations
from tests.vllm.engine_rig import Asked, Reported, check_same
from tests.vllm.stock import checkpoints
from tests.vllm.tiers_rig import KINDS, Apart, apart, start, stop

ROUNDS = 240
RESETS_AT, KILLED_AT, RESTARTS_AT = 60, 120, 180
AT_ONCE = 5
STORES = {"mooncake": LocalMooncake, "s3": LocalBucket}


class Traffic:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.turns = {f"c{turn[0]}t{turn[1]}": asked for turn, asked in conversations(seed, 16).items()}
        self.expected: dict[str, Reported] = {}
        self.compared = self.aborted = 0

    def serve(
        self, engines: list[Apart], *, resets: Apart | None = None, killed: Apart | None = None
    ) -> None:
        """Serve requests on these engines concurrently, and abort some. Meanwhile, reset one engine or kill
        another.
        """
        drawn = [self._deal() for _ in engines]
        for engine, (asked, abort_after) in zip(engines, drawn, strict=True):
            engine.begin("ask", asked, abort_after)
        if resets is not None:
            assert resets.do("reset")
        if killed is not None:
            killed.begin("ask", self._deal()[0], None)
            killed.replace()
        for engine, (asked, abort_after) in zip(engines, drawn, strict=True):
            answers = engine.end()
            if abort_after is not None:
                self.aborted += len(asked)
                continue
            assert answers.keys() == asked.keys()
            check_same(answers, self.expected)
            self.compared += len(asked)

    def _deal(self) -> tuple[dict[str, Asked], int | None]:
        names = self._draw.sample(list(self.turns), AT_ONCE)
        abort_after = self._draw.randrange(4) if self._draw.random() < 0.15 else None
        return {name: self.turns[name] for name in names}, abort_after


def run(kind: checkpoints.Kind, store: str, folder: Path, seed: int) -> str:
    (place := folder / "store").mkdir()
    model, server = checkpoints.make(kind, folder / kind), STORES[store](place)
    loaded: list[int] = []
    with patch.dict(os.environ, server.environment), apart(2) as both:
        first, second = both
        traffic = Traffic(seed)
        first.do("start", model, folder, None, 1, kind)
        traffic.expected = first.do("ask", traffic.turns)
        first.do("stop")
        shared = start(both, model, folder, server.url, 1, kind)
        assert len({*shared}) == 1
        for number in range(ROUNDS):
            if number == RESETS_AT:
                traffic.serve([second], resets=first)
            elif number == KILLED_AT:
                loaded.append(second.do("copied", Direction.LOAD))
                traffic.serve([first], killed=second)
                second.do("start", model, folder, server.url, 1, kind)
            elif number == RESTARTS_AT:
                loaded.append(first.do("copied", Direction.LOAD))
                stop(first)
                first.do("start", model, folder, server.url, 1, kind)
            else:
                traffic.serve(both)
        loaded += [engine.do("copied", Direction.LOAD) for engine in both]
        assert all(loaded), loaded
        stop(*both)
    server.close()
    return (
        f"{kind} on {store}, seed {seed}: {traffic.compared} answers compared, {traffic.aborted} requests aborted; blocks from "
        f"the store: {loaded[1]} and after its restart {loaded[2]} on the engine that was reset, {loaded[0]} and after its kill "
        f"{loaded[3]} on the other one\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="mixed traffic on two vLLMs that share a store")
    parser.add_argument("models", nargs="*", default=["qwen3"], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    asked = parser.parse_args()
    for kind, store, seed in product(asked.models, asked.stores, asked.seeds):
        with tempfile.TemporaryDirectory(prefix="kvoffload-traffic-") as folder:
            sys.stdout.write(run(kind, store, Path(folder), seed))


if __name__ == "__main__":
    main()
