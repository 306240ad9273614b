from __future__ import annotations

import errno
import json
import os
import resource
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.bus.bus import Batch, Bus, Tick
from kvoffload.model import events, facts
from kvoffload.model.causes import CopyOutcome, DegradeCause, StoreOutcome
from kvoffload.model.errors import ConfigError
from kvoffload.model.events import BlocksOffered, Event, OffloadingDegraded, StoreEnded
from kvoffload.model.facts import (
    BlocksAllocated,
    Fact,
    JobOverdue,
    Progress,
    RequestEnded,
    RequestSeen,
    StepScheduled,
    TierRestored,
    TransferReported,
)
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, Rank, RequestId, SlotId
from kvoffload.model.wire import Direction, JobReport, Put, Tier, TransferReport
from kvoffload.telemetry.counters import Counters
from kvoffload.telemetry.journal import Journal, JournalFile
from kvoffload.telemetry.records import (
    JournalError,
    Record,
    Summary,
    _writer,
    _writers,
    read_journal,
    to_plain,
)
from tests.telemetry.streams import any_event
from tests.telemetry.ticks import Ticks

A = RequestId("a")
KEYS = ((BlockKey(b"secret-one"), BlockKey(b"secret-two")), ())
TABLES = ((DeviceBlockId(1), DeviceBlockId(2), DeviceBlockId(3)), (DeviceBlockId(4),))


def journal_of(bus: Bus, ring_size: int = 1024) -> Journal:
    journal = Journal(bus.hook, ring_size=ring_size)
    journal.subscribe(bus)
    return journal


def test_the_ring_keeps_the_last_messages() -> None:
    bus = Bus(Ticks())
    journal = journal_of(bus, ring_size=3)
    for number in range(10):
        bus.publish(BlocksOffered(number))
    assert journal.tail(2) == [
        '{"seq":9,"t":4.5,"event":"BlocksOffered","blocks":8}',
        '{"seq":10,"t":5.0,"event":"BlocksOffered","blocks":9}',
    ]
    assert [json.loads(line)["blocks"] for line in journal.tail(100)] == [7, 8, 9]
    assert journal.tail(0) == []


REPORT = TransferReport(Rank(0), (JobReport(JobId(1), Direction.LOAD, CopyOutcome.DONE, 1, 0, 0),), 5)
REPORT_LINE = (
    '{"rank":0,"jobs":1,"ready_slots":5,"store_share":1.0,"is_growing":false,"slot_bytes":0,"wanted_slots":0,'
    '"lost":null,"below":0}'
)
STEP = StepScheduled(7, (Progress(A, 16, new_keys=KEYS),), (RequestId("b"),), (DeviceBlockId(9),))
STEP_LINE = (
    '"step":7,"progress":1,"preempted":["b"],"reallocated":1,"prefill_tokens":0,"decode_tokens":0,"states":0,'
    '"tails":0,"copies":0'
)


@pytest.mark.parametrize(
    ("fact", "fields"),
    [
        (
            RequestSeen(A, 33, KEYS),
            '"request":"a","prompt_tokens":33,"keys":[2,0],"reads_cache":true,"persists":true,"limits":{"load_tokens":null,"store_tokens":null,"tiers":null,"counts_as":"limited"},"trace_parent":null,"hashes":0,"session":0,"is_last_turn":false',
        ),
        (
            BlocksAllocated(A, TABLES, 16, 32),
            '"request":"a","tables":[3,1],"device_tokens":16,"external_tokens":32',
        ),
        (STEP, STEP_LINE),
        (
            RequestEnded(A, 40, KEYS),
            '"request":"a","confirmed_tokens":40,"new_keys":[2,0],"holds_blocks":true,"new_blocks":[]',
        ),
        (TransferReported(REPORT), f'"report":{REPORT_LINE}'),
        (JobOverdue(JobId(3)), '"job":3'),
        (StoreEnded(StoreOutcome.STORED, 2), '"outcome":"stored","blocks":2'),
    ],
)
def test_lines_have_the_sizes_of_collections_but_no_content(fact: object, fields: str) -> None:
    bus = Bus(Ticks())
    journal = journal_of(bus)
    bus.publish(fact)
    assert journal.tail(9) == [f'{{"seq":1,"t":0.5,"event":"{type(fact).__name__}",{fields}}}']


def test_a_reader_misses_no_line_while_batches_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may read at any moment, such as while the journal looks whether a step was idle."""
    bus = Bus(Ticks())
    journal = journal_of(bus)
    found = list[list[int]]()

    def is_idle(_: StepScheduled) -> bool:
        monkeypatch.setattr(StepScheduled, "is_idle", False)
        found.append([json.loads(line)["step"] for line in journal.tail(9)])
        monkeypatch.setattr(StepScheduled, "is_idle", property(is_idle))
        return False

    bus.publish(StepScheduled(0))
    bus.tick()
    for step in range(1, 4):
        bus.publish(StepScheduled(step))
    monkeypatch.setattr(StepScheduled, "is_idle", property(is_idle))
    bus.tick()
    assert found == [[0, 1, 2, 3]] * 4


def test_batches_that_nothing_moves_to_the_ring_are_bounded() -> None:
    """An engine without steps has no ticks, and a journal that raised is not called any more."""
    bus = Bus(Ticks())
    journal = journal_of(bus, ring_size=2)
    for number in range(100):
        bus.publish(BlocksOffered(number))
    assert len(journal._young) == 32
    assert [json.loads(line)["blocks"] for line in journal.tail(9)] == [98, 99]


def test_at_most_one_part_of_the_disks_index_is_kept() -> None:
    bus = Bus(Ticks())
    journal = journal_of(bus)
    put = Put(SlotId(1), BlockKey(b"key"), (7,))
    for _ in range(65):
        bus.publish(TierRestored(Tier.DISK, 10, (put,)))
    summary = Summary("TierRestored", {"tier": "disk", "slots": 10, "puts": 1, "free": [], "is_last": False})
    assert [batch.messages for batch in journal._ring] == [[summary]] * 64


def test_bytes_in_free_text_are_removed() -> None:
    detail = "no slot for b'secret' or b\"it's secret\" or b'cut off sec"
    bus = Bus(Ticks())
    journal = journal_of(bus)
    bus.publish(OffloadingDegraded(DegradeCause.INVARIANT_BROKEN, detail + "x" * 1000))
    (line,) = map(json.loads, journal.tail(9))
    assert "secret" not in line["detail"]
    assert line["detail"].startswith("no slot for b'...' or b'...' or b'...'")


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for cls in (*vars(events).values(), *vars(facts).values())
        if isinstance(cls, type) and issubclass(cls, Event | Fact)
    ],
)
def test_every_event_and_fact_can_be_written(cls: type[Event | Fact]) -> None:
    assert set(_writers(cls)) <= set(cls.__struct_fields__)
    assert set(cls.__struct_fields__).isdisjoint({"seq", "t", "event"})


def test_a_field_of_an_unknown_type_is_an_error() -> None:
    assert _writer(bytes) is len
    with pytest.raises(TypeError, match="no form"):
        _writer(dict[str, str])
    with pytest.raises(TypeError, match="no form"):
        _writer(int | str)


def write(path: Path, *messages: object, capacity: int = 1000) -> tuple[Bus, Journal]:
    bus = Bus(Ticks())
    journal = Journal(bus.hook, path=path)
    journal.subscribe(bus, capacity)
    for message in messages:
        bus.publish(message)
    bus.close()
    anyio.run(journal.run)
    return bus, journal


@given(st.lists(any_event(), max_size=30))
def test_property_totals_agree_between_journal_and_counters(stream: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        bus, counters = Bus(Ticks()), Counters()
        journal = Journal(bus.hook, path=path)
        counters.subscribe(bus)
        journal.subscribe(bus)
        for event in stream:
            bus.publish(event)
        bus.close()
        anyio.run(journal.run)
        records = list(read_journal(path))
    assert [record.message for record in records] == stream
    assert [record.sequence for record in records] == list(range(1, len(stream) + 1))
    again, counted_again = Bus(), Counters()
    counted_again.subscribe(again)
    for record in records:
        again.publish(record.message)
    assert counted_again.snapshot() == counters.snapshot()


def test_facts_and_unknown_events_are_read_as_summaries(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, JobOverdue(JobId(3)), BlocksOffered(2))
    with path.open("a") as file:
        file.write('{"seq":3,"t":1.5,"event":"RankLost","rank":1}\n')
    assert list(read_journal(path)) == [
        Record(1, 0.5, Summary("JobOverdue", {"job": 3})),
        Record(2, 1.0, BlocksOffered(2)),
        Record(3, 1.5, Summary("RankLost", {"rank": 1})),
    ]


def test_no_content_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(
        path,
        RequestSeen(A, 33, KEYS),
        RequestEnded(A, 40, KEYS),
        StepScheduled(1, (Progress(A, 1, TABLES, KEYS),)),
    )
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("earlier", [None, 0o644])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_can_read_the_file(tmp_path: Path, umask: int, earlier: int | None) -> None:
    path = tmp_path / "journal"
    if earlier:
        path.touch()
        path.chmod(earlier)
    before = os.umask(umask)
    try:
        JournalFile(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_links_to_other_files_are_refused(tmp_path: Path) -> None:
    mine, link, second = tmp_path / "mine", tmp_path / "link", tmp_path / "second"
    mine.write_text("precious")
    mine.chmod(0o644)
    link.symlink_to(mine)
    os.link(mine, second)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for path, problem in [
        (link, "a symbolic link; name the file itself"),
        (tmp_path / "dangling", "a symbolic link"),
        (second, "a second name"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            JournalFile(path)
    assert not (tmp_path / "new").exists()
    assert (mine.read_text(), stat.S_IMODE(mine.stat().st_mode)) == ("precious", 0o644)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "journal").write_text("theirs")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ConfigError, match="another user's file"):
        JournalFile(tmp_path / "journal")


def test_a_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    JournalFile(tmp_path / "link" / "journal").close()
    assert (tmp_path / "folder" / "journal").exists()


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, BlocksOffered(1))
    write(path, BlocksOffered(2))
    assert [record.message for record in read_journal(path)] == [BlocksOffered(1), BlocksOffered(2)]


def test_lines_dropped_by_a_full_feed_leave_a_gap_in_the_numbers(tmp_path: Path) -> None:
    bus, journal = write(tmp_path / "journal", *map(BlocksOffered, range(5)), capacity=3)
    assert [record.sequence for record in read_journal(tmp_path / "journal")] == [1, 2, 3]
    assert bus.feeds["journal"].dropped == 2
    assert len(journal.tail(100)) == 5


@pytest.mark.asyncio
async def test_events_are_written_while_the_journal_runs(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    bus = Bus(Ticks())
    journal = Journal(bus.hook, path=path)
    journal.subscribe(bus)
    async with anyio.create_task_group() as group:
        group.start_soon(journal.run)
        await wait_all_tasks_blocked()
        for number in range(3000):  # the journal writes these in several batches
            bus.publish(BlocksOffered(number))
        bus.close()
    assert len(list(read_journal(path))) == 3000


@pytest.mark.asyncio
async def test_a_cancelled_journal_counts_its_unwritten_lines(tmp_path: Path) -> None:
    bus = Bus(Ticks())
    journal = Journal(bus.hook, path=tmp_path / "journal")
    journal.subscribe(bus)
    async with anyio.create_task_group() as group:
        group.start_soon(journal.run)
        await wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    bus.publish(BlocksOffered(1))
    assert not bus.feeds["journal"]._waiting
    assert len(journal.tail(10)) == 1


@pytest.mark.asyncio
async def test_a_journal_without_a_file_has_nothing_to_run() -> None:
    bus = Bus(Ticks())
    journal = Journal(bus.hook)
    journal.subscribe(bus)
    await journal.run()
    bus.publish(BlocksOffered(1))
    assert bus.feeds == {}
    assert len(journal.tail(10)) == 1


@pytest.mark.parametrize("reported", [True, False])
def test_a_full_disk_stops_only_the_file(tmp_path: Path, reported: bool) -> None:
    path, failures = tmp_path / "journal", list[Exception]()
    bus, removed = Bus(Ticks()), list[str]()
    bus.on_removed = lambda name, _: removed.append(name)
    journal = Journal(bus.hook, path=path, on_failure=failures.append if reported else None)
    journal.subscribe(bus)
    bus.publish(BlocksOffered(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        anyio.run(journal.run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    bus.publish(BlocksOffered(2))
    assert len(failures) == reported
    assert len(journal.tail(10)) == 2
    assert not removed
    assert path.read_text() == '{"seq":1,"t":0.5,"eve'[:20]
    with pytest.raises(JournalError, match="line 1: the line is cut off"):
        list(read_journal(path))


def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = JournalFile(tmp_path / "held")
    for path, problem in [
        (tmp_path / "none" / "journal", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (pipe, "No such device"),
        (Path("/dev/null"), "not a regular file"),
        (Path("with\0zero"), "null byte"),
        (tmp_path / "held", "another process writes it"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            Journal(Ticks(), path=path)
    held.close()
    held.close()
    JournalFile(tmp_path / "held").close()


def test_a_file_whose_mode_cannot_be_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(ConfigError, match="Operation not permitted"):
        JournalFile(tmp_path / "journal")


GOOD = '{"seq":1,"t":0.5,"event":"BlocksOffered","blocks":1}\n'


WRONG_LINES = [
    ("not json\n", "not JSON"),
    ("[1]\n", "Expected `object`, got `array`"),
    ("{}\n", "missing required field `seq`"),
    ('{"seq":true,"t":0,"event":"X"}\n', r"Expected `int`, got `bool` - at `\$.seq`"),
    ('{"seq":1,"t":NaN,"event":"BlocksOffered","blocks":1}\n', "NaN is no number"),
    ('{"seq":1,"t":1e999,"event":"BlocksOffered","blocks":1}\n', "1e999 is no number"),
    ('{"seq":1,"t":1e12,"event":"X"}\n', r"Expected `float` < .* - at `\$.t`"),
    (f'{{"seq":1,"t":{"9" * 400},"event":"X"}}\n', "Number out of range"),
    (f'{{"seq":1,"t":{"9" * 5000},"event":"BlocksOffered","blocks":1}}\n', "not JSON"),
    ('{"seq":' + "[" * 100_000 + "\n", "recursion|Stack overflow"),
    (GOOD[:-1], "cut off"),
    ("\xff\n", "can't decode"),
]
WRONG_FIELDS = [
    ('"event":"BlocksOffered"', "Object missing required field `blocks`"),
    ('"event":"BlocksOffered","blocks":1,"more":2', "Object contains unknown field `more`"),
    ('"event":"BlocksOffered","blocks":"x"', r"Expected `int`, got `str` - at `\$.blocks`"),
    ('"event":"BlocksOffered","blocks":true', "Expected `int`, got `bool`"),
    ('"event":"BlocksEvicted","blocks":1,"cause":"x"', r"Invalid enum value 'x' - at `\$.cause`"),
    ('"event":"HitPinned","slots":3', "Object .* field"),
    ('"event":"JobAbandoned","job":4,"direction":"check","blocks":3', "Invalid enum value"),
    ('"event":"StepScheduled","preempted":null', r"Expected `array`, got `null` - at `\$.preempted`"),
    ('"event":"RequestEnded","request":["a"]', "Expected `str`, got `array`"),
    ('"event":"StepScheduled","preempted":[1]', r"Expected `str`, got `int` - at `\$.preempted\[0\]`"),
]


@pytest.mark.parametrize(
    ("line", "problem"),
    [*WRONG_LINES, *((f'{{"seq":1,"t":0,{fields}}}\n', problem) for fields, problem in WRONG_FIELDS)],
)
def test_the_error_names_the_bad_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes((GOOD + line).encode("latin-1"))
    records = read_journal(path)
    assert next(records) == Record(1, 0.5, BlocksOffered(1))
    with pytest.raises(JournalError, match=problem) as caught:
        list(records)
    assert caught.value.path == path
    assert caught.value.line == 2


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3),
    max_leaves=6,
)


def read_as_far_as_it_goes(path: Path) -> None:
    """Read a file to its end or to the first `JournalError`. No other error may be raised."""
    with suppress(JournalError):
        for record in read_journal(path):
            assert isinstance(record.time, float)


@given(any_event(), st.data())
def test_property_a_line_with_random_fields_is_read_or_refused(event: Event, data: st.DataObject) -> None:
    values = {"seq": 1, "t": 0.5, **to_plain(event)}
    for name in data.draw(st.lists(st.sampled_from(sorted(values)), max_size=3)):
        values[name] = data.draw(anything)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_text(json.dumps(values) + "\n")
        read_as_far_as_it_goes(path)


@given(st.lists(any_event(), max_size=4), st.binary(max_size=30), st.integers(0, 400), st.integers(0, 30))
def test_property_a_file_with_random_bytes_is_read_or_refused(
    stream: list[Event], junk: bytes, place: int, lost: int
) -> None:
    lines = [json.dumps({"seq": 1, "t": 0.5, **to_plain(event)}) for event in stream]
    text = "".join(f"{line}\n" for line in lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_bytes(text[:place] + junk + text[place + lost :])
        read_as_far_as_it_goes(path)


@pytest.mark.parametrize(("path", "problem"), [("/dev/zero", "longer than any"), ("/none", "No such file")])
def test_a_file_that_cannot_be_read_is_an_error_that_names_the_cause(path: str, problem: str) -> None:
    with pytest.raises(JournalError, match=problem):
        list(read_journal(Path(path)))


@pytest.mark.parametrize("steps", [1, 10, 62, 63, 64, 65, 128, 300])
def test_numbers_continue_after_steps_were_left_out(steps: int) -> None:
    bus = Bus(Ticks())
    journal = journal_of(bus, ring_size=1000)
    bus.publish(BlocksOffered(1))
    for step in range(steps):
        bus.publish(StepScheduled(step))
    kept = [json.loads(line) for line in journal.tail(3)]
    assert [(line["seq"], line["event"]) for line in kept] == [
        (1, "BlocksOffered"),
        (steps + 1, "StepScheduled"),
    ]
    for blocks in range(steps):
        bus.publish(BlocksOffered(blocks))
        kept = [json.loads(line) for line in journal.tail(1000)]
        assert [line["seq"] for line in kept] == [1, *range(steps + 1, steps + blocks + 3)]


def test_empty_steps_do_not_push_other_lines_out_of_the_ring() -> None:
    bus = Bus(Ticks())
    journal = journal_of(bus, ring_size=3)
    bus.publish(BlocksOffered(1))
    for step in range(10):
        bus.publish(StepScheduled(step))
    bus.publish(BlocksOffered(2))
    kept = [json.loads(line) for line in journal.tail(3)]
    assert [line.get("step", line["event"]) for line in kept] == ["BlocksOffered", 9, "BlocksOffered"]


STREAM = st.lists(st.integers(0, 3), max_size=40)  # events in a row; 0 stands for an idle step


@given(STREAM, st.sets(st.integers(0, 39)))
def test_property_the_ring_is_the_same_however_often_messages_move_to_it(
    stream: list[int], ticks: set[int]
) -> None:
    journals = [journal_of(Bus(Ticks()), ring_size=4) for _ in range(2)]
    before = 0
    for place, count in enumerate(stream):
        messages: list[object] = [BlocksOffered(count)] * count or [StepScheduled(1)]
        for journal in journals:
            journal._young.append(Batch(before, float(place), messages))
        before += len(messages)
        journals[0]._tick(Tick())
        if place in ticks:
            journals[1]._tick(Tick())
    assert journals[0].tail(9) == journals[1].tail(9)


def test_a_burst_of_messages_moves_to_the_ring_in_parts() -> None:
    bus = Bus(Ticks())
    journal = journal_of(bus)
    for number in range(400):
        bus.publish(BlocksOffered(number))
    lefts = list[int]()
    for _ in range(6):
        bus.tick()
        lefts.append(len(journal._young))
    assert lefts == [300, 225, 161, 97, 33, 0]
    assert [json.loads(line)["blocks"] for line in journal.tail(400)] == list(range(400))
