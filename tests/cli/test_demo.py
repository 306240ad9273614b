"""The demo from end to end, with tiny dimensions, through the real plugin."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import pytest

from kvoffload.cli.demo import engines, play, session
from kvoffload.cli.demo.audit import audit_engine
from kvoffload.cli.demo.conversations import Conversation, make_conversations
from kvoffload.cli.demo.options import DemoOptions
from kvoffload.cli.demo.screen import Screen
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.engine.plugin import load_plugin
from kvoffload.transfer.arena import Arena
from tests.cli.corrupting_plugin import CorruptingPlugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffload.engine import Engine

pytestmark = pytest.mark.slow

KINDS = {
    "full": [],
    "sliding_window": ["--window", "48"],
    "chunked_local": ["--chunk", "32"],
    "recurrent": ["--recurrent", "--device-blocks", "40"],  # five states cost less than five windows
}


def at_progress(monkeypatch: pytest.MonkeyPatch, text: str, act: Callable[[], object]) -> None:
    """Do something once, in the middle of a demo, when it would show this."""

    def progress(_: Screen, shown: str) -> None:
        if shown == text:
            act()

    monkeypatch.setattr(Screen, "progress", progress)


def run_json(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = Exit.OK) -> dict[str, Any]:
    """Run a demo for its JSON; standard output holds nothing else."""
    assert main([*argv, "--json"]) == code, capsys.readouterr()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_kind_and_policy(
    kind: str, policy: str, small: list[str], small_local: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = small if kind == "full" else small_local
    found = run_json([*argv, *KINDS[kind], "--store-policy", policy], capsys)
    assert found["workload"]["attention"] == kind
    assert found["passed"]
    assert found["agreement"] | {"worst_logprob_difference": 0} == {
        "tokens": 4 * 3 * 5,
        "mismatches": 0,
        "first_mismatches": [],
        "worst_logprob_difference": 0,
        "logprob_limit": 1e-3,
    }
    without, with_ = found["without_offloading"], found["with_offloading"]
    assert without["host_tokens"] == 0
    assert with_["host_tokens"] > 0
    assert with_["computed_tokens"] < without["computed_tokens"]
    # Not more: on so small a pool a slow copy leaves no lease for a request's last blocks. The gates ask for 90 %.
    assert with_["returning_reused_share"] >= 0.5
    offloading = found["offloading"]
    assert offloading["loaded_blocks"].keys() == {"loaded"}
    assert (
        offloading["stored_blocks"] + sum(offloading["declined_blocks"].values())
        == offloading["offered_blocks"]
    )


def test_a_host_of_one_block(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    block = 6 * 2 * 16 * 2 * 16 * 4  # layers, key and value, tokens, heads, head dimension, float32
    found = run_json([*small, "--config", f"host_bytes_per_rank={block}"], capsys)
    assert found["offloading"]["host_slots"] == 1
    assert found["passed"]


def test_hits_that_do_not_pay_are_computed(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Which ones, the machine decides; whatever it is, answers are the same and every miss has its cause."""
    found = run_json([*small, "--config", "min_load_tokens=auto"], capsys)
    assert found["passed"]
    declined = found["offloading"]["missed_blocks"].get("load_declined", 0)
    assert declined or found["with_offloading"]["host_tokens"]
    benefit = found["offloading"]["benefit"]
    assert benefit["net_s"] == benefit["saved_s"] - benefit["waited_s"] - benefit["interference_s"]


def test_json_accounts_for_every_token(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(small, capsys)
    for played in (found["without_offloading"], found["with_offloading"]):
        assert played["preemptions"] == 0
        assert played["generated_tokens"] == 4 * 3 * 5
        every = played["device_tokens"] + played["host_tokens"] + played["computed_tokens"]
        assert every == played["prompt_tokens"] + played["generated_tokens"] - 4 * 3
        assert played["first_ttft_s"]["samples"], played["returning_ttft_s"]["samples"] == (4, 8)


def test_json_names_stay(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(small, capsys)
    assert {"kvoffload", "engine", "began", "settings", "host"} <= found.pop("provenance").keys()
    assert {name: sorted(part) for name, part in found.items() if isinstance(part, dict)} == {
        "workload": [
            "attention", "conversations", "device", "device_blocks", "documents", "kv_blocks", "kv_to_cache",
            "library_tokens", "offload", "reach_tokens", "seed", "turns",
        ],
        "without_offloading": PLAY,
        "with_offloading": PLAY,
        "offloading": [
            "benefit", "declined_blocks", "disk_read_bytes", "disk_tokens", "disk_written_bytes", "evicted_blocks",
            "host_slots", "loaded_blocks", "loaded_bytes", "missed_blocks", "offered_blocks", "stored_blocks", "stored_bytes",
        ],
        "agreement": [
            "first_mismatches", "logprob_limit", "mismatches", "tokens", "worst_logprob_difference",
        ],
    }  # fmt: skip
    assert {"schema", "kind", "passed", "returning_ttft_ratio", "broken_laws"} <= found.keys()


PLAY = [
    "computed_tokens", "device_tokens", "elapsed_s", "first_ttft_s", "generated_tokens", "host_tokens",
    "preemptions", "prompt_tokens", "returning_reusable_tokens", "returning_reused_share",
    "returning_reused_tokens", "returning_ttft_s", "tokens_per_s",
]  # fmt: skip


def test_people_get_a_table_and_nothing_on_standard_error(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(small) == Exit.OK
    out, err = capsys.readouterr()
    assert "all 60 tokens agree" in out
    assert "no law is broken" in out
    assert err == ""


def test_the_seed_changes_who_says_what(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def noting(text: bytes, options: DemoOptions) -> list[Conversation]:
        said.append(make_conversations(text, options))
        return said[-1]

    monkeypatch.setattr(session, "make_conversations", noting)
    seeds = [run_json([*small, "--seed", seed], capsys)["workload"]["seed"] for seed in ("1", "2", "1")]
    assert seeds == [1, 2, 1]
    assert said[0] == said[2] != said[1]


def test_conversations_one_at_a_time(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json([*small, "--concurrency", "1"], capsys)["passed"]


def test_more_at_a_time_than_there_are(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json([*small, "--concurrency", "9", "--device-blocks", "60"], capsys)
    assert found["agreement"]["mismatches"] == 0
    assert found["broken_laws"] == []


def test_it_begins_when_there_is_host_memory(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is late: ready after the third prompt that only warms up."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_one_corrupt_block_is_seen(
    kind: str,
    small: list[str],
    small_local: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = small if kind == "full" else small_local
    monkeypatch.setattr(engines, "load_plugin", lambda name: CorruptingPlugin(load_plugin(name)))
    assert main([*argv, *KINDS[kind]]) == Exit.FAILED
    out, err = capsys.readouterr()
    assert "outputs   DIFFER" in out
    assert "no law is broken" in out
    assert "FAILED: outputs differ" in err
    assert '"event":"LoadEnded"' in err or '"event":"StepScheduled"' in err  # the journal's tail


def test_a_broken_law_is_seen(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.runtime.scheduler_side.SchedulerSide.audit", lambda _: ["a slot is lost"])
    assert main(small) == Exit.FAILED
    out, err = capsys.readouterr()
    assert "offloading: a slot is lost" in out
    assert "FAILED: laws are broken" in err


def test_what_is_left_at_the_end_is_a_broken_law(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(engine: Engine, name: str) -> list[str]:
        engine.pool.touch([1])
        try:
            return audit_engine(engine, name)
        finally:
            engine.pool.free([1])

    monkeypatch.setattr(session, "audit_engine", hold)
    assert main(small) == Exit.FAILED
    out = capsys.readouterr().out
    assert "engine without offloading: 1 leased blocks are left" in out
    assert "engine with offloading: 1 blocks in use are left" in out


def test_metrics_can_be_scraped_during_the_run(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []

    def scrape() -> None:
        url = capsys.readouterr().err.split("metrics are at ")[1].split()[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            pages.append(answer.read().decode())

    at_progress(monkeypatch, "with offloading: 9 of 12 turns", scrape)
    assert main([*small, "--serve-metrics", "0"]) == Exit.OK
    (page,) = pages
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values['kvoffload_store_blocks_total{outcome="stored"}']) > 0
    assert float(values['kvoffload_capacity_slots{tier="host"}']) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_metrics_stay_for_a_while_and_a_signal_ends_that(
    number: signal.Signals,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say = Screen.say

    def interrupt(screen: Screen, text: str) -> None:
        say(screen, text)
        if "metrics stay at" in text:
            url = text.split("at ")[1].split()[0]
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert b"kvoffload_" in answer.read()
            signal.raise_signal(number)

    monkeypatch.setattr(Screen, "say", interrupt)
    assert main([*small, "--serve-metrics", "127.0.0.1:0", "--serve-for", "3600"]) == Exit.OK


def check_drained(first: str, second: str) -> None:
    assert first == "kvoffload: interrupted: open requests are cancelled, and submitted copies drain"
    assert second.startswith("kvoffload: drained: all ")
    assert second.endswith(" copies that were submitted have ended; no law is broken")


@pytest.mark.parametrize("play", ["without", "with"])
def test_ctrl_c_drains_and_says_so(
    play: str, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_progress(monkeypatch, f"{play} offloading: 7 of 12 turns", lambda: signal.raise_signal(signal.SIGINT))
    assert main(small) == Exit.INTERRUPTED
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    check_drained(first, second)
    assert third == "kvoffload: interrupted"


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_drains_and_says_so_though_sigint_is_ignored(
    times: int, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it comes again while copies drain."""

    def terminate() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGTERM)

    at_progress(monkeypatch, "with offloading: 7 of 12 turns", terminate)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as end:
            main(small)
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == Exit.TERMINATED
    out, err = capsys.readouterr()
    assert out == ""
    check_drained(*err.splitlines())


def test_an_engine_that_stops_is_reported_with_the_journal(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload.engine import EngineStopped

    def stop() -> None:
        raise EngineStopped("the engine has stopped: a hook raised")

    at_progress(monkeypatch, "with offloading: 5 of 12 turns", stop)
    assert main(small) == Exit.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert "the last of the journal" in err
    assert (
        err.splitlines()[-1] == "kvoffload: the engine could not go on: the engine has stopped: a hook raised"
    )
