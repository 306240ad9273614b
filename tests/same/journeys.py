"""`make journeys`: lists the functions that a store, a load, a miss and a whole request enter.

It prints Markdown tables for the reference engine and, if .venv/vllm exists, for a stock vLLM on the CPU. The
tables contain only functions of kvoffload and its adapters, without comprehensions and without the reference
engine itself. Each journey runs several times, and its table lists the functions that every run entered. Work
done once for many messages, such as writing the journal's lines, is therefore left out. The code names only
hooks, so that it also runs on the other commit of a comparison.
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
    clock: dict[str, list[int]] = field(default_factory=dict)
    """For each hook: how often each call of the hook read the clock."""
    threads: set[str] = field(default_factory=set)

    def of(self, hooks: Sequence[str], *, background: bool = False) -> Journey:
        """Return the calls made in these hooks, and optionally those of background threads."""
        threads = self.threads if background else set()
        kept = {place: calls for place, calls in self.calls.items() if place in hooks or place in threads}
        return Journey(kept, {hook: self.clock[hook] for hook in hooks if hook in self.clock}, threads)

    @property
    def total(self) -> int:
        return sum(calls.total() for calls in self.calls.values())


def in_the_way(journeys: Sequence[Journey], place: str | None = None) -> set[Function]:
    """Return the functions that all of these journeys entered, anywhere or in one hook or thread (`place`)."""
    found = [
        {
            function
            for where in ([place] if place else journey.calls)
            for function in journey.calls.get(where, ())
        }
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
    def record(self, journey: Journey | None = None) -> Iterator[Journey]:
        self._journey = journey = journey or Journey()
        sys.setprofile(self._seen)
        try:
            yield journey
        finally:
            sys.setprofile(None)
            self._journey = None

    def wait_for_background(self) -> None:
        before, deadline = -1, time.monotonic() + PATIENCE_S
        while self._background_calls != before and time.monotonic() < deadline:
            before = self._background_calls
            time.sleep(QUIET_S)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        if not _is_ours(frame):
            return
        if event == "call":
            self._called(frame)
        elif event == "return":
            self._local.depth = max(0, self._depth - 1)
        elif event == "c_call" and getattr(argument, "__module__", None) == "time":
            readings = self._journey.clock.get(self._local.place) if self._journey and self._depth else None
            if readings:
                readings[-1] += 1

    @property
    def _depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def _called(self, frame: FrameType) -> None:
        is_engine = threading.get_ident() == self._engine
        if not is_engine:
            self._background_calls += 1
        is_hook = self._depth == 0
        self._local.depth = self._depth + 1
        if is_hook:
            self._local.place = (
                frame.f_code.co_name if is_engine else threading.current_thread().name.rstrip("-0123456789")
            )
        journey = self._journey
        if journey is None or frame.f_code.co_name in _COMPREHENSIONS:
            return
        place = self._local.place
        function = Function(frame.f_globals["__name__"], frame.f_code.co_qualname)
        journey.calls.setdefault(place, Counter())[function] += 1
        if not is_engine:
            journey.threads.add(place)
        elif is_hook:
            journey.clock.setdefault(place, []).append(0)


def _is_ours(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith("kvoffload") and not module.startswith("kvoffload.engine")


Journeys = Mapping[str, Sequence[Journey]]


# -- engines ------------------------------------------------------------------------------------------------------


class Reference:
    """The reference engine with its plugin, real host copies and real threads."""

    STORE = ("plan", "start_stores", "take_output", "update")
    LOOKUP = ("lookup",)
    LOAD = ("lookup", "allocated", "plan", "start_loads", "take_output", "update")
    SCHEDULER = (
        "request_added",
        "lookup",
        "prefix_boundary",
        "allocated",
        "plan",
        "request_ended",
        "update",
    )

    def __init__(self) -> None:
        from kvoffload.engine import Engine
        from kvoffload_reference.plugin import ReferencePlugin
        from tests.reference import rig

        self._plugin = ReferencePlugin()
        self._engine = Engine(rig.config_of("full", step_tokens=64), self._plugin, clock=time.monotonic)

    def ask(self, seed: int, tokens: int) -> None:
        from kvoffload.engine import SamplingParams
        from tests.reference import rig

        self._engine.submit(rig.text(seed, BLOCKS * rig.BLOCK + 1), SamplingParams(tokens))

    def step(self) -> None:
        self._engine.step()

    def is_busy(self) -> bool:
        return self._engine.has_work

    def forget_device(self) -> None:
        assert self._engine.pool.reset_prefix_cache()

    def blocks(self, metric: str, label: str) -> int:
        assert self._plugin.offload is not None
        return self._plugin.offload.counters.snapshot().count(metric, label)

    def close(self) -> None:
        self._engine.close()


class Vllm:
    """A stock vLLM in this process, run by the rig of the adapter's tests."""

    _AFTER = (
        "get_finished",
        "get_transfer_results",
        "build_connector_worker_meta",
        "update_connector_output",
    )
    STORE = ("build_connector_meta", "bind_connector_metadata", "wait_for_save", *_AFTER)
    LOOKUP = ("get_num_new_matched_tokens",)
    LOAD = (
        *LOOKUP,
        "update_state_after_alloc",
        "build_connector_meta",
        "bind_connector_metadata",
        "start_load_kv",
        *_AFTER,
    )
    SCHEDULER = (
        "on_new_request",
        *LOOKUP,
        "update_state_after_alloc",
        "build_connector_meta",
        "take_events",
        "update_connector_output",
        "request_finished",
        "request_finished_all_groups",
    )

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._asked = 0

    def ask(self, seed: int, tokens: int) -> None:
        from tests.vllm.engine_rig import Asked
        from tests.vllm.stock.engines import BLOCK

        self._asked += 1
        self._rig.ask(f"r{self._asked}", Asked((seed,) * (BLOCKS * BLOCK + 1), tokens))

    def step(self) -> None:
        self._rig.step()

    def is_busy(self) -> bool:
        return bool(self._rig.scheduler.has_requests())

    def forget_device(self) -> None:
        assert self._rig.scheduler.reset_prefix_cache()

    def blocks(self, metric: str, label: str) -> int:
        return int(self._rig.counts.count(metric, label))


Engine = Reference | Vllm

# -- journeys -----------------------------------------------------------------------------------------------------


def reference() -> Journeys:
    tracer = Tracer()
    engine = Reference()
    try:
        return travel(engine, tracer)
    finally:
        engine.close()
        tracer.close()


def vllm() -> Journeys:
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
    with tracer.record() as journey:
        engine.ask(seed, 2)
        _step_while(engine, tracer, engine.is_busy)
    return journey


def _store(engine: Engine, tracer: Tracer, seed: int) -> Journey:
    """Record the calls from the step after the prompt was computed until the prompt's blocks can hit."""
    engine.ask(seed, 4)
    engine.step()
    journey = _until_counted(engine, tracer, "kvoffload_store_blocks_total", "stored")
    _step_while(engine, tracer, engine.is_busy)
    return journey


def _load(engine: Engine, tracer: Tracer, seed: int) -> Journey:
    """Record the calls from a request's lookup until the request's load is reported to the engine."""
    engine.ask(seed, 4)
    journey = _until_counted(engine, tracer, "kvoffload_load_blocks_total", "loaded")
    _step_while(engine, tracer, engine.is_busy)
    return journey


def _until_counted(engine: Engine, tracer: Tracer, metric: str, outcome: str) -> Journey:
    """Record steps until this metric has counted all blocks of a prompt.

    Raises:
        TimeoutError: the count has not grown far enough within the time limit.
    """
    wanted = engine.blocks(metric, outcome) + BLOCKS
    whole = Journey()
    deadline = time.monotonic() + PATIENCE_S
    while engine.blocks(metric, outcome) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{metric} has not grown by {BLOCKS} {outcome}")
        with tracer.record(whole):
            engine.step()
            tracer.wait_for_background()
    return whole


def _step_while(engine: Engine, tracer: Tracer, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the engine does not finish")
        engine.step()
        tracer.wait_for_background()


# -- tables -------------------------------------------------------------------------------------------------------


def tables(engine: str, journeys: Journeys) -> str:
    """Return two Markdown tables of mean numbers of calls: one by journey, one by hook and thread."""
    lines = [
        f"## {engine}",
        "",
        *_head("journey", "functions", "files", "threads", "calls", "clock readings in a hook"),
    ]
    for name, runs in journeys.items():
        functions = in_the_way(runs)
        files = {function.module for function in functions}
        threads = 1 + min(len(run.threads) for run in runs)
        readings = max(count for run in runs for counts in run.clock.values() for count in counts)
        lines.append(
            _row(name, len(functions), len(files), threads, fmean(run.total for run in runs), readings)
        )
    lines += ["", *_head("journey", "hook or thread", "functions", "calls", "clock readings in a call")]
    for name, runs in journeys.items():
        for place in dict.fromkeys(place for run in runs for place in run.calls):
            calls = fmean(run.calls.get(place, Counter[Function]()).total() for run in runs)
            readings = max(count for run in runs for count in run.clock.get(place, [0]))
            lines.append(_row(name, place, len(in_the_way(runs, place)), calls, readings))
    return "\n".join(lines)


def _head(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: object) -> str:
    return f"| {' | '.join(f'{cell:.0f}' if isinstance(cell, float) else str(cell) for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make journeys", description=__doc__)
    parser.add_argument("--engine", choices=("reference", "vllm"), help="only this engine, in this Python")
    asked = parser.parse_args().engine
    if asked != "vllm":
        _write(tables("Reference engine", reference()))
    if asked == "vllm":
        _write(tables("vLLM", vllm()))
    elif asked is None and VLLM.exists():
        command = [str(VLLM), "-m", "tests.same.journeys", "--engine", "vllm"]
        subprocess.run(
            command, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}, cwd=ROOT, check=True
        )


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
