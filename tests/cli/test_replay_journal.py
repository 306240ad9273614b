"""`kvoffload replay-journal` finds what a core decides otherwise, and refuses what it cannot read in one line."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvoffload.core.outbox
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.cli.replay.command import run
from kvoffload.cli.replay.player import NOT_THE_CORES
from kvoffload.model import events
from kvoffload.model.errors import KVOffloadError
from kvoffload.model.events import Event
from kvoffload.telemetry.journal import Record, read_journal
from kvoffload.telemetry.replay_journal import HEADER, QUESTION, REPLAY
from tests.simulate.campaign import keep_journal
from tests.simulate.mutants import mutated
from tests.simulate.scenario import draw
from tests.simulate.simulation import Simulation, simulate, slow_disk

SEED = 9  # stores, loads, evicts and resets
Capture = pytest.CaptureFixture[str]
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of a whole run; tests write what they change elsewhere."""
    path, result = keep_journal(SEED, tmp_path_factory.mktemp("journals"))
    assert result.problem is None
    return path


def replay(path: Path, *options: str) -> int:
    return main(["replay-journal", str(path), *options])


def changed(journal: Path, path: Path, change: Callable[[Lines], object]) -> Path:
    """A copy of the journal with its lines changed in place."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def place(lines: Lines, name: str, ok: Callable[[dict[str, Any]], object] = lambda line: True) -> int:
    return next(place for place, line in enumerate(lines) if line["event"] == name and ok(line))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 5])
def test_a_run_comes_out_as_it_was_recorded(seed: int, tmp_path: Path, capsys: Capture) -> None:
    path, _ = keep_journal(seed, tmp_path)
    assert replay(path) == Exit.OK
    counts = re.fullmatch(
        r".*: (\d+) facts, (\d+) questions, (\d+) events; all as recorded, and every law holds\n",
        capsys.readouterr().out,
    )
    assert counts is not None
    assert sum(map(int, counts.groups())) == len(path.read_text().splitlines()) - 1


@pytest.mark.slow
def test_the_file_that_an_engine_writes_is_the_one_that_is_followed(tmp_path: Path) -> None:
    scenario = draw(SEED)
    followed: list[str] = []
    with slow_disk(scenario, is_full=False):
        Simulation(scenario, followed.append, tmp_path).run()
    text = (tmp_path / "journal").read_text()
    assert text.splitlines() == followed
    assert replay(tmp_path / "journal") == Exit.OK


def test_other_readers_take_it_as_any_journal(journal: Path, tmp_path: Path) -> None:
    assert main(["timeline", str(journal), "-o", str(tmp_path / "trace.json")]) == Exit.OK
    assert main(["report", str(journal), "-o", str(tmp_path / "page.html")]) == Exit.OK


def test_it_holds_no_key(tmp_path: Path) -> None:
    scenario, keys = draw(SEED), set[str]()
    lines: list[str] = []
    world = Simulation(scenario, lines.append, None)
    add = world.engine._scheduler.add

    def watch(request: Any) -> None:  # noqa: ANN401
        add(request)
        keys.update(key.hex() for group in range(request.groups) for key in request.keys(group))

    world.engine._scheduler.add = watch  # type: ignore[method-assign]
    world.run()
    text = "\n".join(lines)
    assert keys
    assert not any(key[:16] in text for key in keys)
    assert "b'" not in text
    assert "\\\\x" not in text


def test_every_event_is_the_cores_or_known_not_to_be() -> None:
    """Who adds an event that watchers tell must say so, or every replay would miss it."""
    core = Path(kvoffload.core.outbox.__file__).parent
    source = "".join(path.read_text() for path in core.glob("*.py"))
    classes = [cls for cls in vars(events).values() if isinstance(cls, type) and issubclass(cls, Event)]
    told_by_others = {
        cls for cls in classes if cls is not Event and not re.search(rf"\b{cls.__name__}\(", source)
    }
    assert told_by_others == set(NOT_THE_CORES)


# -- what differs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "seed"),
    [("failed_load_counts_as_loaded", 9), ("stale_ids_stay", 84), ("reset_forgets_nothing", 10)],
)
def test_what_a_broken_core_decided_shows_at_its_first_line(
    mutant: str, seed: int, tmp_path: Path, capsys: Capture
) -> None:
    with mutated(mutant):
        path, result = keep_journal(seed, tmp_path)
    assert result.problem
    assert replay(path) == Exit.FAILED
    printed = capsys.readouterr().out
    assert re.search(r"line \d+: first difference\n  recorded: .*\n  replayed: .*\n", printed)
    assert re.search(r"^> +\d+ \{", printed, re.MULTILINE)


def test_a_law_that_breaks_again_is_named_with_its_line(tmp_path: Path, capsys: Capture) -> None:
    with mutated("one_rank_is_enough"):
        path, _ = keep_journal(0, tmp_path)
        assert replay(path) == Exit.FAILED
    assert re.search(
        r"line \d+: a law does not hold\n  job 0 is open although no rank copies", capsys.readouterr().out
    )


def test_another_answer_of_the_core_is_found(journal: Path, tmp_path: Path, capsys: Capture) -> None:
    found: list[int] = []

    def change(lines: Lines) -> None:
        found.append(place(lines, QUESTION, lambda line: line["question"] == "lookup" and line["answer"]))
        lines[found[0]]["answer"] += 1

    assert replay(changed(journal, tmp_path / "changed", change)) == Exit.FAILED
    assert f"line {found[0] + 1}: first difference\n  recorded: lookup -> " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("event", "field"), [("StoreScheduled", "blocks"), ("LookupSettled", "miss_tokens"), ("LoadEnded", "job")]
)
def test_another_event_is_found(
    event: str, field: str, journal: Path, tmp_path: Path, capsys: Capture
) -> None:
    def change(lines: Lines) -> None:
        lines[place(lines, event)][field] += 1

    assert replay(changed(journal, tmp_path / "changed", change)) == Exit.FAILED
    assert f"recorded: {event}(" in capsys.readouterr().out


def test_another_question_to_the_device_is_found(journal: Path, tmp_path: Path, capsys: Capture) -> None:
    def change(lines: Lines) -> None:
        line = lines[place(lines, "StepScheduled", lambda line: line[REPLAY]["device"])]
        line[REPLAY]["device"].pop()

    assert replay(changed(journal, tmp_path / "changed", change)) == Exit.FAILED
    assert "replayed: device." in capsys.readouterr().out


def test_a_question_that_is_not_asked_again_is_found(journal: Path, tmp_path: Path, capsys: Capture) -> None:
    def change(lines: Lines) -> None:
        lines[place(lines, "StepScheduled")][REPLAY]["device"].append(["free_blocks", 3])

    assert replay(changed(journal, tmp_path / "changed", change)) == Exit.FAILED
    assert "recorded: device.free_blocks(3)\n  replayed: the device is not asked" in capsys.readouterr().out


def test_events_that_the_journal_lacks_at_its_end_are_found(
    journal: Path, tmp_path: Path, capsys: Capture
) -> None:
    def change(lines: Lines) -> None:
        del lines[place(lines, "CapacityGrown") :]

    assert replay(changed(journal, tmp_path / "changed", change)) == Exit.FAILED
    assert "recorded: nothing more\n  replayed: CapacityGrown(" in capsys.readouterr().out


def test_what_happened_behind_an_unreadable_line_is_not_guessed(
    journal: Path, tmp_path: Path, capsys: Capture
) -> None:
    torn = tmp_path / "torn"
    torn.write_text(journal.read_text()[:-20])
    assert replay(torn) == Exit.FAILED
    printed = capsys.readouterr()
    assert "the line is cut off" in printed.out
    assert "all before it is as recorded, and every law holds" in printed.out


def test_processes_that_wrote_one_file_one_after_the_other_are_replayed_apart(
    journal: Path, tmp_path: Path, capsys: Capture
) -> None:
    twice = tmp_path / "twice"
    twice.write_text(journal.read_text() * 2)
    assert replay(twice, "--audit-every", "50") == Exit.OK
    facts = sum(1 for record in read_journal(journal) if is_fact(record))
    assert f" {2 * facts} facts, " in capsys.readouterr().out


def is_fact(record: Record) -> bool:
    return REPLAY in getattr(record.message, "fields", {})


# -- what cannot be replayed ------------------------------------------------------------------------------------


def drop_line(lines: Lines) -> None:
    del lines[20]


def other_format(lines: Lines) -> None:
    lines[0].update(format=99, version="9.9")


def without_header(lines: Lines) -> None:
    assert lines.pop(0)["event"] == HEADER


def unknown_fact(lines: Lines) -> None:
    lines[place(lines, "RequestSeen")]["event"] = "MoonRisen"


def fact_without_a_field(lines: Lines) -> None:
    del lines[place(lines, "RequestSeen")][REPLAY]["fact"]["keys"]


def key_that_is_no_number(lines: Lines) -> None:
    lines[place(lines, "RequestSeen")][REPLAY]["fact"]["keys"][0] = ["a"]


def unknown_question(lines: Lines) -> None:
    lines[place(lines, QUESTION)]["question"] = "why"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_line, r"line 21: 1 lines are missing before it"),
        (
            other_format,
            r"line 1: it has the replay format 99, written by kvoffload 9\.9; this one reads format 1",
        ),
        (without_header, r'line 1: it was not written for a replay: set journal_for to "replay"'),
        (unknown_fact, r"line \d+: .*MoonRisen is no fact that can be told again"),
        (fact_without_a_field, r"line \d+: .*RequestSeen has missing or unknown fields: keys"),
        (key_that_is_no_number, r"line \d+: .*'a' is not int"),
        (unknown_question, r"line \d+: .*'why' is no question to a core"),
    ],
)
def test_a_journal_that_cannot_be_replayed_is_refused_in_one_line(
    change: Callable[[Lines], object], message: str, journal: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert replay(changed(journal, tmp_path / "changed", change)) == Exit.USAGE
    printed = capsys.readouterr().err
    assert re.fullmatch(rf"kvoffload: error: .*{message}.*\n", printed), printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"seq": 1, "t"', "cut off"),
        ("nonsense\n", "not JSON"),
        ('{"seq":1,"t":0,"event":"StepScheduled","step":0}\n', "not written for a replay"),
        ('{"seq":1,"t":0,"event":"ReplayBegins"}\n', "format None"),
        ('{"seq":1,"t":0,"event":"ReplayBegins","format":1}\n', "not what a journal for a replay has"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert replay(path) == Exit.USAGE
    printed = capsys.readouterr().err
    assert re.fullmatch(rf"kvoffload: error: .*{message}.*\n", printed), printed


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert replay(tmp_path / "nothing") == Exit.USAGE
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_recording_changes_nothing_in_what_happens(tmp_path: Path) -> None:
    plain, recorded = simulate(SEED), simulate(SEED, tmp_path / "journal")
    assert plain.offload.counters.snapshot().counts == recorded.offload.counters.snapshot().counts
    assert plain.loop.now == recorded.loop.now


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 99), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)


def places_of(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    """Every container in a line, with each of its places."""
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [(value, key) for key, _ in items] + [place for _, item in items for place in places_of(item)]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@pytest.mark.timeout(300)
@given(data=st.data())
def test_whatever_a_line_says_is_played_or_refused(
    data: st.DataObject, journal: Path, tmp_path: Path
) -> None:
    def change(lines: Lines) -> None:
        del lines[40:]
        container, key = data.draw(st.sampled_from(places_of(data.draw(st.sampled_from(lines)))))
        container[key] = data.draw(ANYTHING)

    path = changed(journal, tmp_path / "changed", change)
    with suppress(KVOffloadError):
        assert run(argparse.Namespace(journal=path, audit_every=1)) in (Exit.OK, Exit.FAILED)
