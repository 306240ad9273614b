from __future__ import annotations

import pytest

from kvoffload.disk.tier_key import TierKey
from kvoffload.model.causes import RemoteFault
from kvoffload.model.wire import JobReport
from kvoffload.transfer import remote
from tests.remote.fake_store import FakeStore
from tests.transfer.rig import CORRUPT, DONE, FAILED
from tests.transfer.tier_rig import LOAD, STORE, RemoteRig

KEY = TierKey(bytes(32))


def test_a_job_is_copied_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_BLOCKS", 3)
    rig = RemoteRig()
    were = [rig.fill(slot) for slot in range(4)]
    rig.copy(STORE, [0, 1, 2, 3], [0, 1, 2, 3])
    rig.copy(LOAD, [7, 6, 5, 4], [0, 1, 2, 3])
    assert [rig.slot(slot) for slot in (7, 6, 5, 4)] == were
    assert rig.store.calls.count("put") == rig.store.calls.count("get") == 2


def test_a_fetch_cancelled_between_batches_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_BLOCKS", 1)
    rig = RemoteRig()
    was = rig.fill(0)
    rig.copy(STORE, [0, 1], [0, 1])
    job = rig.start(LOAD, [2, 3], [0, 1])
    rig.before_each(LOAD, lambda *_: rig.copies.cancel((job,)))
    report = rig.ended()[job]
    assert (report.outcome, report.missing, report.copied_bytes) == (FAILED, (), len(was))


@pytest.mark.parametrize("verify", ["off", "full"])
def test_r17_a_put_cancelled_before_it_read_its_slots_writes_nothing(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, ended = RemoteRig(verify=verify), list[JobReport]()
    rig.fill(0)

    def hang(_: memoryview) -> None:
        rig.clock.jump(2.0)
        ended.extend(rig.reports().values())

    monkeypatch.setattr(rig.store, "register", hang)
    rig.start(STORE, [0], [0])
    rig.ended()
    assert [report.outcome for report in ended] == [FAILED]
    assert rig.store.values == {}


def test_missing_blocks_are_named_and_the_others_are_fetched() -> None:
    rig = RemoteRig()
    was = rig.fill(0)
    rig.copy(STORE, [0], [0])
    report = rig.copy(LOAD, [1, 2], [5, 0])
    assert (report.outcome, report.missing) == (DONE, (0,))
    assert rig.slot(2) == was
    nothing = rig.copy(LOAD, [1], [5])
    assert (nothing.outcome, nothing.missing) == (FAILED, (0,))


def test_a_full_store_refuses_blocks_and_stays_in_use() -> None:
    rig = RemoteRig()
    rig.copy(STORE, [0], [0])
    rig.store.is_full = True
    some = rig.copy(STORE, [0, 1], [0, 1])
    assert (some.outcome, some.missing) == (DONE, (1,))
    none = rig.copy(STORE, [1, 2], [1, 2])
    assert (none.outcome, none.missing) == (FAILED, (0, 1))
    assert rig.copies.calls.works
    assert rig.copies.calls.faults[RemoteFault.FULL] == 2


def test_a_new_connection_registers_the_memory_again() -> None:
    rig = RemoteRig()
    was = rig.fill(0)
    rig.copy(STORE, [0], [0])
    values, rig.store.is_gone = rig.store.values, True
    assert rig.copy(LOAD, [1], [0]).outcome is FAILED
    rig.store = FakeStore()
    rig.store.values = values
    rig.clock.jump(1.0)
    rig.reports()
    rig.ended()
    for _ in range(2):
        assert rig.copy(LOAD, [2], [0]).outcome is DONE
    assert rig.slot(2) == was
    assert rig.store.registered == 1


@pytest.mark.parametrize("other", [None, TierKey(b"x" * 32)], ids=["no key", "another key"])
def test_r17_engines_with_different_tier_keys_use_none_of_each_others_values(other: TierKey | None) -> None:
    with_key = RemoteRig(key=KEY)
    without = RemoteRig(key=other, store=with_key.store)
    for writer, reader, place in ((with_key, without, 0), (without, with_key, 1)):
        writer.fill(0)
        assert writer.copy(STORE, [0], [place]).outcome is DONE
        assert writer.copy(LOAD, [1], [place]).outcome is DONE
        assert reader.copy(LOAD, [1], [place]).outcome is CORRUPT


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
@pytest.mark.parametrize("call", ["seal", "is_whole"])
def test_r17_with_a_tier_key_later_writes_to_the_stores_memory_are_not_used(
    key: TierKey | None, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, memory, real = RemoteRig(key=key), list[memoryview](), getattr(remote, call)
    monkeypatch.setattr(rig.store, "register", memory.append)

    def other_writes(*arguments: object) -> object:
        forged = b"forged by another machine"
        if call == "seal":
            memory[0][: len(forged)] = forged
        answer = real(*arguments)
        if call == "is_whole":
            memory[0][: len(forged)] = forged
        return answer

    monkeypatch.setattr(remote, call, other_writes)
    was = rig.fill(0)
    rig.copy(STORE, [0], [0])
    assert rig.copy(LOAD, [1], [0]).outcome is DONE
    assert (rig.slot(1) == was) is (key is not None)
