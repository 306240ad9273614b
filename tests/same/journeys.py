"""`make journeys`: lists the functions that a store, a load, a miss and a whole request enter.

It prints a Markdown table for the reference engine and, if .venv/vllm exists, one for a stock vLLM on the CPU. A
table counts only functions of kvoffload and its adapters, without comprehensions and without the reference engine
itself. Each journey runs several times, and only functions that every run entered count. Work done once for many
messages, such as writing the journal's lines, is therefore left out. The code names only hooks, so that it also
runs on the other commit of a comparison.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.vllm.engine_rig import Rig

BLOCKS = 8
"""Each prompt has this many whole blocks, and one more token."""
RUNS = 8
QUIET_S = 0.03
"""If no function is called for this long, the background threads have finished the work of the last step."""
PATIENCE_S = 120.0
ROOT = Path(__file__).resolve().parent.parent.parent
VLLM = ROOT / ".venv/vllm/bin/python"

_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


# -- tracing ------------------------------------------------------------------------------------------------------


class Function(NamedTuple):
    module: str
    name: str


@dataclass
class Journey:
    """The function calls of a journey, by the hook or background thread that made the calls."""

    calls: dict[str, Counter[Function]] = field(default_factory=dict)
    threads: set[str] = field(default_factory=set)

    def of(self, hooks: Sequence[str], *, background: bool = False) -> Journey:
        """Return the calls made in these hooks, and optionally those of background threads."""
        threads = self.threads if background else set()
        kept = {place: calls for place, calls in self.calls.items() if place in hooks or place in threads}
        return Journey(kept, threads)


def in_the_way(journeys: Sequence[Journey], place: str | None = None) -> set[Function]:
    """Return the functions that all of these journeys entered, anywhere or in one hook or thread (`place`)."""
    found = [
        {function for where, calls in journey.calls.items() if place in (None, where) for function in calls}
        for journey in journeys
    ]
    return set.intersection(*found)


class Tracer:
    """Traces the engine's thread during a recording, and every thread that starts after the tracer was made."""

    def __init__(self) -> None:
        self._journey: Journey | None = None
        self._engine = threading.get_ident()
        self._local = threading.local()
        self._background_calls = 0
        threading.setprofile(self._seen)

    def close(self) -> None:
        threading.setprofile(None)

    @contextmanager
    def record(self, journey: Journey) -> Iterator[None]:
        self._journey = journey
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._journey = None

    def wait_for_background(self) -> None:
        before, deadline = -1, time.monotonic() + PATIENCE_S
        while self._background_calls != before and time.monotonic() < deadline:
            before = self._background_calls
            time.sleep(QUIET_S)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("kvoffload") or module.startswith("kvoffload.engine"):
            return
        depth = getattr(self._local, "depth", 0)
        if event == "call":
            self._local.depth = depth + 1
            self._called(frame, is_hook=depth == 0)
        elif event == "return":
            self._local.depth = max(0, depth - 1)

    def _called(self, frame: FrameType, *, is_hook: bool) -> None:
        is_engine = threading.get_ident() == self._engine
        self._background_calls += not is_engine
        if is_hook:
            thread = threading.current_thread().name.rstrip("-0123456789")
            self._local.place = frame.f_code.co_name if is_engine else thread
        if self._journey is None or frame.f_code.co_name in _COMPREHENSIONS:
            return
        function = Function(frame.f_globals["__name__"], frame.f_code.co_qualname)
        self._journey.calls.setdefault(self._local.place, Counter())[function] += 1
        if not is_engine:
            self._journey.threads.add(self._local.place)


Journeys = Mapping[str, Sequence[Journey]]


# -- engines ------------------------------------------------------------------------------------------------------


class Reference:
    """The reference engine with its plugin, real host copies and real threads."""

    STORE = ("plan", "start_stores", "take_output", "update")
    LOOKUP = ("lookup",)
    LOAD = ("lookup", "allocated", "plan", "start_loads", "take_output", "update")
    SCHEDULER = ("request_added", "lookup", "prefix_boundary", "allocated", "plan", "request_ended", "update")

    def __init__(self) -> None:
        from kvoffload.engine import Engine
        from kvoffload_reference.plugin import ReferencePlugin
        from tests.reference import rig

        self._plugin = ReferencePlugin()
        self._engine = Engine(rig.config_of("full", step_tokens=64), self._plugin, clock=time.monotonic)
        self.step, self.close = self._engine.step, self._engine.close

    def ask(self, seed: int, tokens: int) -> None:
        from kvoffload.engine import SamplingParams
        from tests.reference import rig

        self._engine.submit(rig.text(seed, BLOCKS * rig.BLOCK + 1), SamplingParams(tokens))

    def is_busy(self) -> bool:
        return self._engine.has_work

    def forget_device(self) -> None:
        assert self._engine.pool.reset_prefix_cache()

    def blocks(self, metric: str, label: str) -> int:
        assert self._plugin.offload is not None
        return self._plugin.offload.counters.snapshot().count(metric, label)


class Vllm:
    """A stock vLLM in this process, run by the rig of the adapter's tests."""

    _PLAN = ("build_connector_meta", "bind_connector_metadata")
    _AFTER = (
        "get_finished",
        "get_transfer_results",
        "build_connector_worker_meta",
        "update_connector_output",
    )
    STORE = (*_PLAN, "wait_for_save", *_AFTER)
    LOOKUP = ("get_num_new_matched_tokens",)
    LOAD = (*LOOKUP, "update_state_after_alloc", *_PLAN, "start_load_kv", *_AFTER)
    SCHEDULER = (
        *("on_new_request", *LOOKUP, "update_state_after_alloc", "build_connector_meta", "take_events"),
        *("update_connector_output", "request_finished", "request_finished_all_groups"),
    )

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._asked = 0
        self.step = rig.step

    def ask(self, seed: int, tokens: int) -> None:
        from tests.vllm.engine_rig import Asked
        from tests.vllm.stock.engines import BLOCK

        self._asked += 1
        self._rig.ask(f"r{self._asked}", Asked((seed,) * (BLOCKS * BLOCK + 1), tokens))

    def is_busy(self) -> bool:
        return bool(self._rig.scheduler.has_requests())

    def forget_device(self) -> None:
        assert self._rig.scheduler.reset_prefix_cache()

    def blocks(self, metric: str, label: str) -> int:
        return int(self._rig.counts.count(metric, label))


Engine = Reference | Vllm


# -- journeys -----------------------------------------------------------------------------------------------------


def travel(engine: Engine, tracer: Tracer, runs: int = RUNS) -> Journeys:
    _life(engine, tracer, 1)  # the first request in a process makes extra calls, so it is not recorded
    engine.forget_device()
    _life(engine, tracer, 1)
    fresh, returning, stores, loads = ([] for _ in range(4))
    for number, seed in enumerate(range(2, 2 + 2 * runs, 2)):
        for _ in range(number % 3):
            # Some work is done once for many messages. Extra requests move it into other hooks in each run.
            _life(engine, tracer, 1)
        fresh.append(_life(engine, tracer, seed))
        engine.forget_device()
        returning.append(_life(engine, tracer, seed))
        stores.append(_store(engine, tracer, seed + 1))
        engine.forget_device()
        loads.append(_load(engine, tracer, seed + 1))
    return {
        f"store of {BLOCKS} blocks": [each.of(engine.STORE, background=True) for each in stores],
        f"load of {BLOCKS} blocks": [each.of(engine.LOAD, background=True) for each in loads],
        "miss": [each.of(engine.LOOKUP) for each in fresh],
        "life, fresh": [each.of(engine.SCHEDULER) for each in fresh],
        "life, returning": [each.of(engine.SCHEDULER) for each in returning],
    }


def _life(engine: Engine, tracer: Tracer, seed: int) -> Journey:
    """Record a request that generates two tokens, until the engine is idle and all copies have ended."""
    journey = Journey()
    with tracer.record(journey):
        engine.ask(seed, 2)
    return _steps(engine, tracer, engine.is_busy, journey)


def _store(engine: Engine, tracer: Tracer, seed: int) -> Journey:
    """Record the calls from the step after the prompt was computed until the prompt's blocks can hit."""
    engine.ask(seed, 4)
    engine.step()
    return _until_counted(engine, tracer, "kvoffload_store_blocks_total", "stored")


def _load(engine: Engine, tracer: Tracer, seed: int) -> Journey:
    """Record the calls from a request's lookup until the request's load is reported to the engine."""
    engine.ask(seed, 4)
    return _until_counted(engine, tracer, "kvoffload_load_blocks_total", "loaded")


def _until_counted(engine: Engine, tracer: Tracer, metric: str, outcome: str) -> Journey:
    """Record steps until this metric has counted all blocks of a prompt; then let the request end."""
    wanted = engine.blocks(metric, outcome) + BLOCKS
    journey = _steps(engine, tracer, lambda: engine.blocks(metric, outcome) < wanted, Journey())
    _steps(engine, tracer, engine.is_busy, Journey())
    return journey


def _steps(engine: Engine, tracer: Tracer, goes_on: Callable[[], bool], journey: Journey) -> Journey:
    """Record steps while this condition holds.

    Raises:
        TimeoutError: it still holds after the time limit.
    """
    deadline = time.monotonic() + PATIENCE_S
    while goes_on():
        if time.monotonic() > deadline:
            raise TimeoutError("the engine does not finish")
        with tracer.record(journey):
            engine.step()
            tracer.wait_for_background()
    return journey


# -- the table ----------------------------------------------------------------------------------------------------


def tables(engine: str, journeys: Journeys) -> str:
    """Return a Markdown table of functions, files and mean numbers of calls, by journey and by hook or thread."""
    names = "journey", "hook or thread", "functions", "files", "calls"
    lines = [f"## {engine}", "", _row(*names), "|" + "---|" * len(names)]
    for name, runs in journeys.items():
        for place in (None, *dict.fromkeys(place for run in runs for place in run.calls)):
            functions = in_the_way(runs, place)
            files = {function.module for function in functions}
            calls = fmean(
                sum(calls.total() for where, calls in run.calls.items() if place in (None, where))
                for run in runs
            )
            lines.append(_row(name, place or "all", len(functions), len(files), f"{calls:.0f}"))
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make journeys", description=__doc__)
    parser.add_argument("--engine", choices=("reference", "vllm"), help="only this engine, in this Python")
    asked = parser.parse_args().engine
    if asked != "vllm":
        _print("Reference engine", _reference())
    if asked == "vllm":
        _print("vLLM", _vllm())
    elif asked is None and VLLM.exists():
        command = [str(VLLM), "-m", "tests.same.journeys", "--engine", "vllm"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
        subprocess.run(command, env=environment, cwd=ROOT, check=True)


def _reference() -> Journeys:
    tracer = Tracer()
    engine = Reference()
    try:
        return travel(engine, tracer)
    finally:
        engine.close()
        tracer.close()


def _vllm() -> Journeys:
    """Trace a stock vLLM. This function must run in vLLM's environment."""
    from tests.vllm.engine_rig import offloading

    tracer = Tracer()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            offloading("qwen3", Path(folder), max_num_batched_tokens=512) as rig,
        ):
            return travel(Vllm(rig), tracer)
    finally:
        tracer.close()


def _print(engine: str, journeys: Journeys) -> None:
    sys.stdout.write(f"{tables(engine, journeys)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
