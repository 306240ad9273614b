from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kvoffload.cli.advise import advise
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.cli.top import Reading, parse_page
from kvoffload.model import events, facts
from kvoffload.model.causes import LoadOutcome, StoreOutcome
from kvoffload.model.engine import EngineShape
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId, JobId, RequestId
from kvoffload.model.wire import Tier
from kvoffload.telemetry.capacity import CapacityCurve, Sizes
from kvoffload.telemetry.catalogue import CAPACITIES, POLICIES, Series
from kvoffload.telemetry.exporter import KVOffloadCollector, serve
from tests.bench.trace import CoreEngine, Tiers
from tests.bench.trace_file import Prompt
from tests.settings import make_config
from tests.telemetry.fake_source import FakeSource
from tests.telemetry.traffic import TOKENS, chats

A, JOB = RequestId("a"), JobId(1)
GIB = 2**30


def ratios(host: Sequence[float], disk: Sequence[float] = (0.0,) * 6) -> Series:
    return {
        (tiers, name): share
        for tiers, shares in (("host", host), ("host_and_disk", disk))
        for name, share in zip(CAPACITIES, shares, strict=True)
    }


GROWS = (0.05, 0.15, 0.29, 0.41, 0.42, 0.42)
FLAT = (0.2, 0.287, 0.29, 0.295, 0.30, 0.30)
NEVER = (0.0, 0.1, 0.29, 0.295, 0.30, 0.30)


class Engine(FakeSource):
    """An engine with 32 GiB of host memory, for which predictions rest on an hour of traffic."""

    def __init__(self, **state: Series) -> None:
        super().__init__()
        self.state = {
            "kvoffload_capacity_slots": {("host",): 32},
            "kvoffload_slot_bytes": {("host",): GIB, ("disk",): GIB},
            "kvoffload_predicted_seconds": {(): 7200},
            "kvoffload_predicted_margin_ratio": {(): 0.01},
            "kvoffload_predicted_prompt_tokens_per_second": {(): 10_000},
            "kvoffload_prefill_tokens_per_second": {(): 10_000},
            "kvoffload_predicted_hit_tokens_ratio": ratios(GROWS),
            **state,
        }
        self.bus.publish(events.FirstTokenReached(A, None, 0.1, 29, 0, (), 71))

    def reading(self) -> Reading:
        return parse_page(generate_latest(KVOffloadCollector(self)).decode(), 0.0)[""]

    def texts(self) -> dict[str, str]:
        return {one.about: one.text for one in advise(self.reading())}

    def serve(self) -> AbstractContextManager[str]:
        registry = CollectorRegistry()
        registry.register(KVOffloadCollector(self))
        return serve(registry, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (GROWS, "64.0 GiB instead of 32.0 GiB of host memory would find 41 % of prompt tokens instead of 29 %, some 7.2 seconds of prefill a minute (give or take 1.0 points)."),
        (FLAT, "16.0 GiB instead of 32.0 GiB of host memory would find nearly as much, 29 % of prompt tokens instead of 29 % (give or take 1.0 points)."),
        (NEVER, "Even 256.0 GiB instead of 32.0 GiB of host memory would find only 30 % of prompt tokens instead of 29 % (give or take 1.0 points)."),
        ((0.05, 0.1, 0.12, 0.121, 0.2, 0.3), "256.0 GiB instead of 32.0 GiB of host memory would find 30 % of prompt tokens instead of 12 %, some 10.8 seconds of prefill a minute (give or take 1.0 points)."),
        ((0.2, 0.25, 0.29, 0.291, 0.292, 0.32), "Even 256.0 GiB instead of 32.0 GiB of host memory would find only 32 % of prompt tokens instead of 29 % (give or take 1.0 points)."),
    ],
    ids=["grow", "shrink", "keep", "late", "too late"],
)  # fmt: skip
def test_the_host_should_grow_while_each_doubling_finds_more(host: Sequence[float], said: str) -> None:
    assert Engine(kvoffload_predicted_hit_tokens_ratio=ratios(host)).texts()["host"] == said


@pytest.mark.parametrize(
    ("slots", "disk", "said"),
    [
        (0, (0.3, 0.33, 0.347, 0.35, 0.35, 0.35), "A disk of 32.0 GiB below today's host would find 35 % of prompt tokens, 5.7 points more, some 3.4 seconds of prefill a minute (give or take 1.0 points)."),
        (0, (0.3,) * 6, "A disk would find only 1.0 points more."),
        (100, GROWS, "200.0 GiB instead of 100.0 GiB of disk would find 41 % of prompt tokens instead of 29 %, some 7.2 seconds of prefill a minute (give or take 1.0 points)."),
    ],
    ids=["get one", "none", "grow"],
)  # fmt: skip
def test_a_disk_is_advised_by_what_it_adds_to_todays_host(
    slots: int, disk: Sequence[float], said: str
) -> None:
    engine = Engine(
        kvoffload_capacity_slots={("host",): 32, ("disk",): slots},
        kvoffload_predicted_hit_tokens_ratio=ratios(GROWS, disk),
    )
    assert engine.texts()["disk"] == said
    assert ("not counting the disk" in engine.texts()["host"]) == (slots > 0)


def test_eager_stores_that_are_rarely_loaded_should_be_lazy() -> None:
    engine = Engine(kvoffload_info={("1", "vllm", "0.32", "eager", "off", "auto"): 1})
    assert "stores" not in engine.texts()  # the host has not been filled once
    engine.bus.publish(events.StoreEnded(StoreOutcome.STORED, 1000))
    engine.bus.publish(events.LoadEnded(JOB, A, 30, LoadOutcome.LOADED))
    said = "For 100 stored blocks 3 were loaded again: set store_policy to lazy."
    assert engine.texts()["stores"] == said
    engine.bus.publish(events.LoadEnded(JOB, A, 470, LoadOutcome.LOADED))
    assert engine.texts()["stores"] == "For 100 stored blocks 50 were loaded again."


@pytest.mark.parametrize(
    ("setting", "used", "found", "said"),
    [
        ("eager", "eager", (0.07, 0.14, 0.09), "; of the recent prompts' blocks twice would have found 14 %, eager 7 %: set store_policy to auto"),
        ("eager", "eager", (0.25, 0.22, 0.26), ""),
        ("lazy", "lazy", (0.36, 0.29, 0.33), "; of the recent prompts' blocks eager would have found 36 %, lazy 33 %: set store_policy to auto"),
        ("auto", "twice", (0.07, 0.14, 0.09), "; store_policy auto stores by twice"),
    ],
)  # fmt: skip
def test_the_store_policy_that_finds_most_is_advised(
    setting: str, used: str, found: Sequence[float], said: str
) -> None:
    engine = Engine(
        kvoffload_info={("1", "vllm", "0.32", setting, "off", "auto"): 1},
        kvoffload_store_policy={(used,): 1},
        kvoffload_predicted_policy_hit_ratio={
            (name,): share for name, share in zip(POLICIES, found, strict=True)
        },
    )
    engine.bus.publish(events.StoreEnded(StoreOutcome.STORED, 1000))
    engine.bus.publish(events.LoadEnded(JOB, A, 30, LoadOutcome.LOADED))
    assert engine.texts()["stores"] == f"For 100 stored blocks 3 were loaded again{said}."


def test_an_unknown_store_policy_of_a_later_version_is_compared_with_none() -> None:
    engine = Engine(kvoffload_predicted_policy_hit_ratio={(name,): 0.1 for name in POLICIES})
    engine.bus.publish(events.StoreEnded(StoreOutcome.STORED, 1000))
    reading = engine.reading()
    reading.samples["kvoffload_store_policy"] = [({"policy": "later"}, 1.0)]
    (stores,) = (one.text for one in advise(reading) if one.about == "stores")
    assert stores == "For 100 stored blocks 0 were loaded again."


def test_what_offloading_brought_so_far_is_said_with_the_disks_bytes() -> None:
    engine = Engine(
        kvoffload_prefill_seconds_saved_total={(): 640},
        kvoffload_interference_seconds_total={("load",): 4},
    )
    assert engine.texts()["so_far"] == "So far loads have saved 640 s of prefill and cost 4.0 s, net 636 s."


@pytest.mark.parametrize(
    ("state", "doubt"),
    [
        ({}, None),
        ({"kvoffload_predicted_seconds": {(): 240}}, "they rest on 4 minutes of traffic"),
        ({"kvoffload_predicted_seconds": {(): 0}}, "there are no predictions yet"),
        ({"kvoffload_predicted_margin_ratio": {(): 0.08}}, "they may be off by 8.0 points"),
        ({"kvoffload_degraded": {("transfer_dead",): 1}}, "offloading is off"),
        ({"kvoffload_predicted_hit_tokens_ratio": ratios((0.5,) * 6)}, "29 % of prompt tokens were found, not 50 % as predicted for today's size"),
    ],
)  # fmt: skip
def test_advice_says_when_not_to_trust_it(state: Mapping[str, Series], doubt: str | None) -> None:
    said = Engine(**state).texts()["trust"]
    if doubt is None:
        assert said.startswith(
            "These numbers rest on 2 hours of traffic; 29 % of prompt tokens were found, 29 %"
        )
    else:
        assert said == f"Do not trust these numbers yet: {doubt}."


@pytest.mark.parametrize(("fetched", "share"), [((), None), (((Tier.NODE, 30), (Tier.REMOTE, 70)), "50 %")])
def test_advice_says_what_came_from_tiers_that_are_not_predicted(
    fetched: tuple[tuple[Tier, int], ...], share: str | None
) -> None:
    engine = Engine(kvoffload_predicted_hit_tokens_ratio=ratios((0.145,) * 6))
    engine.bus.publish(events.FirstTokenReached(A, None, 0.1, 0, 0, fetched, 100 - len(fetched) * 50))
    end = f"; another {share} came from other engines' memory or the remote tier, and another size would find a part of it, too."
    assert engine.texts()["trust"].endswith(end if share else " for today's size.")


def test_a_young_engine_says_what_it_cannot_know() -> None:
    engine = Engine(kvoffload_predicted_unknown_ratio={("host", "2x"): 0.09})
    assert (
        "(give or take 1.0 points; up to 9.0 points more, if it had been full at the start)"
        in engine.texts()["host"]
    )


@pytest.mark.parametrize(
    ("host", "lacking", "said"),
    [
        (FLAT, (0.0, 0.0, 0.49, 0.5, 0.5, 0.5), "Whether 16.0 GiB of host memory would find as much as 32.0 GiB is not known yet: so far 32.0 GiB would have found 29 % of prompt tokens, and up to 49.0 points more, if it had been full at the start."),
        (NEVER, (0.0, 0.0, 0.0, 0.0, 0.0, 0.4), "Whether 32.0 GiB of host memory would find as much as 256.0 GiB is not known yet: so far 256.0 GiB would have found 30 % of prompt tokens, and up to 40.0 points more, if it had been full at the start."),
        (FLAT, (0.0, 0.03, 0.04, 0.5, 0.5, 0.5), "16.0 GiB instead of 32.0 GiB of host memory would find nearly as much, 29 % of prompt tokens instead of 29 % (give or take 1.0 points; up to 3.0 points more, if it had been full at the start)."),
    ],
    ids=["not shrink", "not keep", "shrink"],
)  # fmt: skip
def test_a_young_engine_is_not_called_large_enough(
    host: Sequence[float], lacking: Sequence[float], said: str
) -> None:
    engine = Engine(
        kvoffload_predicted_hit_tokens_ratio=ratios(host), kvoffload_predicted_unknown_ratio=ratios(lacking)
    )
    assert engine.texts()["host"] == said


def test_a_young_engine_does_not_know_whether_a_disk_would_find_more() -> None:
    engine = Engine(
        kvoffload_predicted_hit_tokens_ratio=ratios(GROWS, (0.3,) * 6),
        kvoffload_predicted_unknown_ratio=ratios((0.0,) * 6, (0.4,) * 6),
    )
    said = "Whether a disk would find more is not known yet: so far it would have found 1.0 points more, and up to 40.0 points more, if it had been full at the start."
    assert engine.texts()["disk"] == said


def test_no_size_is_compared_while_host_memory_grows_to_the_configured_one() -> None:
    bytes_of: Series = {("wanted",): 64 * GIB, ("reserved",): 32 * GIB}
    engine = Engine(
        kvoffload_host_bytes=bytes_of, kvoffload_predicted_hit_tokens_ratio=ratios(GROWS, (0.35,) * 6)
    )
    said = (
        "Of the configured 64.0 GiB of host memory 32.0 GiB are ready; other sizes are compared once all are."
    )
    assert engine.texts()["host"] == said
    assert "disk" not in engine.texts(), "a disk is advised by what it adds to a host of today's size"
    engine.state = {**engine.state, "kvoffload_host_bytes": {**bytes_of, ("reserved",): 64 * GIB}}
    assert {"host", "disk"} <= set(engine.texts())
    assert "are ready" not in engine.texts()["host"]


def test_an_engine_without_predictions_gets_only_a_warning() -> None:
    assert list(advise(Reading(0.0))) == [advise(Reading(0.0))[-1]]
    assert advise(Reading(0.0))[0].about == "trust"


def test_a_server_and_its_json_give_the_same_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine().serve() as url:
        assert main(["advise", url]) == Exit.OK
        text = capsys.readouterr().out
        assert main(["advise", url, "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["kind"]) == (1, "advice")
    (engine,) = found["engines"]
    assert [one["text"] for one in engine["advice"]] == text.splitlines()
    (host, *_) = engine["advice"]
    assert host["numbers"]["bytes"] == 64 * GIB
    assert host["numbers"]["gain"] == pytest.approx(0.12)


def test_a_source_that_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "http://127.0.0.1:1/metrics"]) == Exit.USAGE
    assert "not reachable" in capsys.readouterr().err
    assert main(["advise", "127.0.0.1:1"]) == Exit.USAGE
    assert "not reachable" in (said := capsys.readouterr().err)
    assert "a file 127.0.0.1:1 does not exist" in said
    assert main(["advise", str(tmp_path / "none")]) == Exit.USAGE
    assert "; there is no such file either" in capsys.readouterr().err
    for name in ("none.invalid", "long" * 99):
        assert main(["advise", name]) == Exit.USAGE
        assert f"a file {name} does not exist" in capsys.readouterr().err


def test_a_journal_may_come_through_a_pipe(
    demo_journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["advise", str(demo_journal)])
    expected = capsys.readouterr().out
    os.mkfifo(pipe := tmp_path / "pipe")
    writing = threading.Thread(target=pipe.write_bytes, args=(demo_journal.read_bytes(),), daemon=True)
    writing.start()
    assert main(["advise", str(pipe)]) == Exit.OK
    writing.join()
    assert capsys.readouterr().out == expected


# -- the proof ------------------------------------------------------------------------------------------------------


def replay(prompts: Iterable[Prompt], host: int, disk: int = 0) -> float:
    """Return the share of prompt tokens that the real core finds with tiers of these sizes."""
    engine = CoreEngine(Tiers("tiers", host, disk), set(), TOKENS)
    for prompt in prompts:
        engine.serve(prompt)
    return engine.count["hit"] / engine.count["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("about", "host", "disk"), [("host", 200, 0), ("host", 800, 0), ("disk", 400, 0), ("disk", 800, 0)]
)
def test_a_second_replay_at_the_advised_size_finds_what_was_promised(
    about: str, host: int, disk: int
) -> None:
    prompts = [Prompt(0.0, len(keys) * TOKENS + 1, keys) for keys in chats(11, 1500)]
    group = GroupSpec(GroupId(0), AttentionKind.FULL, TOKENS)
    shape = EngineShape((group,), ranks=1, device_blocks=0, step_tokens=1)
    curve = CapacityCurve(shape, make_config(), lambda: Sizes(host, disk, GIB), lambda: 0.0)
    engine = Engine(kvoffload_capacity_slots={("host",): host, ("disk",): disk})
    curve.subscribe(engine.bus)
    for number, prompt in enumerate(prompts):
        engine.bus.publish(facts.RequestSeen(RequestId(f"{number}"), prompt.tokens, (prompt.keys,)))
        curve.take()
    curve.measure()
    predicted = {name: series for name, series in curve.series.items() if "second" not in name}
    engine.state = {**engine.state, **predicted}
    (advised,) = [one for one in advise(engine.reading()) if one.about == about]
    size, today = int(advised.numbers["bytes"] / GIB), disk if about == "disk" else host
    assert size > today
    assert replay(prompts, host, disk) == pytest.approx(advised.numbers["today"], abs=0.02)
    found = replay(prompts, host, size) if about == "disk" else replay(prompts, size)
    assert found == pytest.approx(advised.numbers["predicted"], abs=0.02)
    assert advised.numbers["gain"] > 0.02
