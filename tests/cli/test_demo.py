from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
import pytest

from kvoffload.cli.demo import play, session
from kvoffload.cli.demo.engines import audit_engine, audit_offloading, engine_config, kv_blocks
from kvoffload.cli.demo.options import LAYERS, DemoOptions
from kvoffload.cli.demo.play import Turn, TurnId
from kvoffload.cli.demo.results import compare, quantiles
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.engine import EngineStopped, RequestStats, Token
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.wire import Direction, TransferPlan, TransferReport
from kvoffload.transfer.arena import Arena
from kvoffload_reference.plugin import ReferenceWorker
from tests.telemetry.fake_source import FakeSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvoffload.cli.demo.engines import Engines
    from kvoffload.engine import Engine
    from kvoffload.model.ids import JobId
    from kvoffload.runtime.scheduler_side import SchedulerSide

slow = pytest.mark.slow

KINDS = {
    "full": [],
    "window": ["--layers", "window", "--device-blocks", "80"],
    "recurrent": ["--layers", "recurrent", "--device-blocks", "40"],
}


def at_progress(monkeypatch: pytest.MonkeyPatch, text: str, act: Callable[[], object]) -> None:
    """Call `act` when the demo shows the progress text `text`."""

    def progress(_: Screen, shown: str) -> None:
        if shown == text:
            act()

    monkeypatch.setattr(Screen, "progress", progress)


def run_json(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = Exit.OK) -> dict[str, Any]:
    """Run a demo with JSON output, and check that it prints nothing else to standard output."""
    assert main([*argv, "--json"]) == code, capsys.readouterr()
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


class InTime(ReferenceWorker):
    """Ends every copy of a step in the step, as copies do that are faster than the engine."""

    def take_output(self) -> object:
        pump = self.offload.pump
        while pump.has_jobs:
            pump.poll()
            time.sleep(0)
        return super().take_output()


# -- a run -------------------------------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(("kind", "policy"), [*((kind, "eager") for kind in KINDS), ("full", "lazy")])
def test_outputs_are_equal_and_tokens_are_saved(
    kind: str,
    policy: str,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffload_reference.plugin.ReferenceWorker", InTime)
    found = run_json([*small, *KINDS[kind], "--config", f"store_policy={policy}"], capsys)
    assert found["passed"]
    assert found["audit"] == []
    assert (found["agreement"]["tokens"], found["agreement"]["mismatches"]) == (4 * 3 * 5, [])
    without, with_ = found["without_offloading"], found["with_offloading"]
    assert without["host_tokens"] == 0
    assert with_["host_tokens"] > 0
    assert with_["computed_tokens"] < without["computed_tokens"]
    assert with_["reused_share"] == 1.0
    assert found["offloading"]["loaded_blocks"].keys() == {"loaded"}
    if kind != "recurrent":
        for played in (without, with_):
            every = played["device_tokens"] + played["host_tokens"] + played["computed_tokens"]
            assert every == played["prompt_tokens"] + played["generated_tokens"] - 4 * 3


@slow
def test_without_json_a_table_is_printed_and_nothing_on_standard_error(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small) == Exit.OK
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert out.startswith("First token of returning turns: ")
    for part in (
        "4 conversations of 3 turns, tiny model, full attention, cpu",
        "KV cache: 26 blocks on the device; the conversations need 44 (1.7x)",
        "seconds (estimate)",
        "never seen ",
        "all 60 tokens agree",
        "audit     passed",
    ):
        assert part in out


@slow
def test_a_demo_of_one_turn_reports_that_no_turn_returned(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--conversations", "1", "--turns", "1"]) == Exit.OK
    out = capsys.readouterr().out
    assert out.startswith("No turn returned: give at least 2 --turns.")
    assert "1 conversation of 1 turn, tiny model" in out


@slow
def test_a_slower_demo_reports_it(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    medians = iter([0.1, 0.1, 0.1, 0.4])
    monkeypatch.setattr("kvoffload.cli.demo.results.statistics.median", lambda _: next(medians))
    assert main(small) == Exit.OK
    assert "returning turns: 100 -> 400 ms (4.0x SLOWER)." in capsys.readouterr().out


@slow
def test_conversations_begin_when_host_memory_is_ready(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep host memory from becoming ready before the fourth warm-up prompt."""
    ready, prepare, warm_up, warmed = threading.Event(), Arena.prepare, play.warm_up, []

    async def late(arena: Arena, **settings: bool) -> None:
        await anyio.to_thread.run_sync(ready.wait)
        await prepare(arena, **settings)

    async def counted(engine: Engine, tokens: int, seed: int) -> None:
        warmed.append(engine)
        if len(warmed) > 3:
            ready.set()
        await warm_up(engine, tokens, seed)

    monkeypatch.setattr(Arena, "prepare", late)
    monkeypatch.setattr(session, "warm_up", counted)
    found = run_json(small, capsys)
    assert len(warmed) > 3
    assert found["offloading"]["loaded_blocks"]["loaded"] > 0


@pytest.mark.parametrize("layers", LAYERS)
def test_by_default_the_conversations_need_the_devices_cache_several_times(layers: str) -> None:
    options = DemoOptions(layers=layers)
    config = engine_config(options)
    assert config.num_blocks is not None
    assert kv_blocks(options, config) / (config.num_blocks - 1) > 2.5


# -- wrong results are reported ----------------------------------------------------------------------------------------


class CorruptingWorker(ReferenceWorker):
    """Changes the first block of the first load before the load is reported to the engine."""

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.firsts: list[tuple[JobId, int]] = []
        super().register_kv_caches(tensors)

    def start_loads(self, plan: object) -> None:
        assert isinstance(plan, TransferPlan), plan
        self.firsts += [(load.id, load.targets[0]) for load in plan.loads]
        super().start_loads(plan)

    def take_output(self) -> object:
        output = super().take_output()
        for report in output.jobs if isinstance(output, TransferReport) else ():
            is_loaded = report.direction is Direction.LOAD and report.outcome is CopyOutcome.DONE
            if is_loaded and report.job == self.firsts[0][0]:
                for tensor in self.tensors:
                    tensor[self.firsts[0][1]].neg_()
        return output


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_corrupt_block_is_noticed(
    kind: str, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload_reference.plugin.ReferenceWorker", CorruptingWorker)
    assert main([*small, *KINDS[kind]]) == Exit.FAILED
    out, err = capsys.readouterr()
    assert "Outputs DIFFER." in out
    assert "outputs   DIFFER in" in out
    assert "audit     passed" in out
    assert err.splitlines()[-1] == "kvoffload: FAILED: outputs differ"


@slow
def test_slots_left_in_use_at_the_end_fail_the_audit(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(both: Engines) -> list[str]:
        both.offloaded.pool.touch([1])
        try:
            return [*audit_engine(both.offloaded, "engine"), *audit_offloading(both.offload)]
        finally:
            both.offloaded.pool.free([1])

    monkeypatch.setattr(session, "audit", hold)
    monkeypatch.setattr("kvoffload.runtime.scheduler_side.SchedulerSide.audit", lambda _: ["a slot is lost"])
    assert main(small) == Exit.FAILED
    out, err = capsys.readouterr()
    for problem in ("engine: 1 leased blocks are left", "offloading: a slot is lost", "PROBLEMS."):
        assert problem in out
    assert "FAILED: the audit found problems" in err


@pytest.mark.parametrize(
    ("state", "problems"),
    [
        ({"slots": {("host", "empty"): 3, ("host", "ready"): 2, ("host", "quarantined"): 1}}, []),
        ({"open_jobs": {("host", "store", "abandoned"): 1}}, []),
        ({"slots": {("host", "pinned"): 2}}, ["2 slots of the host are still pinned"]),
        ({"open_jobs": {("host", "load", "submitted"): 1}}, ["1 load jobs of the host are still submitted"]),
        ({"slots": {("disk", "filling"): 2}}, ["2 slots of the disk are still filling"]),
        ({"degraded": {("invariant_broken",): 1}}, ["it was switched off: invariant_broken"]),
    ],
)
def test_offloading_that_is_not_at_rest_fails_the_audit(state: dict[str, Any], problems: list[str]) -> None:
    capacity: dict[tuple[str, ...], float] = {}
    for (tier, _), slots in state.get("slots", {}).items():
        capacity[tier,] = capacity.get((tier,), 0) + slots
    source = FakeSource({f"kvoffload_{name}": found for name, found in state.items()})
    source.state = {**source.state, "kvoffload_capacity_slots": capacity}
    side = SimpleNamespace(counters=source.counters, audit=list, gauges=source.gauges)
    expected = [f"offloading: {problem}" for problem in problems]
    assert audit_offloading(cast("SchedulerSide", side)) == expected


def turn(*answer: Token) -> list[Turn]:
    return [Turn(TurnId(0, 1), answer, RequestStats(1, arrived_s=0.0))]


def test_close_log_probabilities_agree() -> None:
    found = compare(turn(Token(1, -0.5), Token(2, -1.5)), turn(Token(1, -0.5009), Token(2, -1.5)))
    assert (found["tokens"], found["mismatches"]) == (2, [])
    assert found["worst_logprob_difference"] == pytest.approx(0.0009)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([Token(9, -0.5), Token(8, -9.0)], "1 (-0.500000) without offloading, 9 (-0.500000) with it"),
        ([Token(1, -0.502), Token(2, -1.5)], "1 (-0.500000) without offloading, 1 (-0.502000) with it"),
        ([Token(1, math.nan), Token(2, -1.5)], "1 (-0.500000) without offloading, 1 (nan) with it"),
        ([Token(1, -0.5)], "2 tokens without offloading, 1 with it"),
    ],
)
def test_any_difference_is_a_mismatch(answer: list[Token], problem: str) -> None:
    [found] = compare(turn(Token(1, -0.5), Token(2, -1.5)), turn(*answer))["mismatches"]
    assert found.startswith("conversation 0, turn 1")
    assert found.endswith(problem)


@pytest.mark.parametrize(
    ("count", "p50", "p99"), [(1, 1, 1), (2, 1.5, 2), (99, 50, 99), (100, 50.5, 99), (101, 51, 100)]
)
def test_quantiles_are_nearest_ranks(count: int, p50: float, p99: float) -> None:
    assert quantiles([float(n) for n in range(count, 0, -1)]) == {"p50": p50, "p99": p99}


# -- while it runs -----------------------------------------------------------------------------------------------------


@slow
def test_metrics_can_be_scraped_during_the_run_and_after_it_until_ctrl_c(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []

    def scrape(url: str) -> None:
        with urllib.request.urlopen(url, timeout=10) as answer:
            pages.append(answer.read().decode())

    say = Screen.say

    def interrupt(screen: Screen, text: str) -> None:
        say(screen, text)
        if "metrics stay at" in text:
            scrape(text.split("at ")[1].split()[0])
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Screen, "say", interrupt)
    at_progress(
        monkeypatch,
        "with offloading: 9 of 12 turns",
        lambda: scrape(capsys.readouterr().err.split("metrics are at ")[1].split()[0]),
    )
    argv = [*small, "--serve-metrics", "127.0.0.1:0", "--serve-for", "3600"]
    assert main(argv) == Exit.INTERRUPTED
    assert "all 60 tokens agree" in capsys.readouterr().out
    during, after = pages
    values = dict(line.rsplit(" ", 1) for line in during.splitlines() if not line.startswith("#"))
    assert float(values['kvoffload_store_blocks_total{outcome="stored"}']) > 0
    assert float(values['kvoffload_capacity_slots{tier="host"}']) > 0
    assert "kvoffload_" in after


def check_drained(first: str, second: str) -> None:
    assert first == "kvoffload: interrupted: open requests are cancelled, and submitted copies drain"
    assert second.startswith("kvoffload: drained: all ")
    assert second.endswith(" copies that were submitted have ended; the audit passed")


@slow
@pytest.mark.parametrize("play", ["without", "with"])
def test_ctrl_c_drains_copies_and_reports_the_interruption(
    play: str, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_progress(monkeypatch, f"{play} offloading: 7 of 12 turns", lambda: signal.raise_signal(signal.SIGINT))
    assert main(small) == Exit.INTERRUPTED
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    check_drained(first, second)
    assert third == "kvoffload: interrupted"


@slow
@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_drains_copies_even_if_sigint_is_ignored(
    times: int, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGTERM)

    at_progress(monkeypatch, "with offloading: 7 of 12 turns", terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert main(small) == Exit.TERMINATED
    out, err = capsys.readouterr()
    assert out == ""
    check_drained(*err.splitlines())


@slow
def test_an_engine_that_stops_is_a_one_line_error(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise EngineStopped("the engine has stopped: a hook raised")

    at_progress(monkeypatch, "with offloading: 5 of 12 turns", stop)
    assert main(small) == Exit.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kvoffload: the engine could not continue: the engine has stopped: a hook raised\n"


# -- the screen --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "shown"),
    [
        (True, False, "\r\x1b[Kone\r\x1b[Kkvoffload: done\n"),
        (True, True, "kvoffload: done\n"),
        (False, False, "kvoffload: done\n"),
    ],
)
def test_progress_is_shown_in_place_on_a_terminal(
    is_terminal: bool,
    quiet: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    screen = Screen(quiet=quiet)
    screen.progress("one")
    screen.say("done")
    assert capsys.readouterr().err == shown
