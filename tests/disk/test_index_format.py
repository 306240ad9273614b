from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.disk.index import (
    IndexContents,
    IndexHeader,
    NotAnIndex,
    encode_batch,
    encode_header,
    encode_index,
    read_index,
)
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.errors import DiskError
from kvoffload.model.ids import BlockKey, SlotId
from kvoffload.model.wire import DiskRecord, Invalidate, Put, Use

SLOTS = 8
FINGERPRINT = "0123456789abcdef" * 2
HEADER = IndexHeader(b"g" * 16, (b"first file's id.", b"other file's id."), SLOTS, FINGERPRINT)


def put(slot: int, key: int = 0) -> Put:
    return Put(SlotId(slot), BlockKey(key.to_bytes(36, "big")), (key * 7, 2**64 - 1 - key))


def invalidate(slot: int) -> Invalidate:
    return Invalidate(SlotId(slot))


def use(slot: int) -> Use:
    return Use(SlotId(slot))


def encoded(*batches: list[DiskRecord], header: IndexHeader = HEADER) -> bytes:
    parts = [encode_batch(header, number, batch) for number, batch in enumerate(batches)]
    return encode_header(header) + b"".join(parts)


def read(data: bytes) -> IndexContents:
    return read_index(data, SLOTS, FINGERPRINT)


def entries(data: bytes) -> list[Put]:
    return read(data).entries.puts()


def expected(batches: list[list[DiskRecord]]) -> list[Put]:
    """Return the entries that result from the records, computed with a dict."""
    held: dict[SlotId, Put] = {}
    for record in chain(*batches):
        if isinstance(record, Use):
            if record.slot in held:
                held[record.slot] = held.pop(record.slot)
            continue
        held.pop(record.slot, None)
        if isinstance(record, Put):
            held[record.slot] = record
    return list(held.values())


slots = st.integers(0, SLOTS - 1)
records = st.one_of(
    st.builds(put, slots, st.integers(0, 2**60)), st.builds(invalidate, slots), st.builds(use, slots)
)
histories = st.lists(st.lists(records, min_size=1, max_size=6), max_size=6)


@given(histories)
def test_entries_are_read_in_order_of_use(batches: list[list[DiskRecord]]) -> None:
    data = encoded(*batches)
    contents = read(data)
    assert contents.entries.puts() == expected(batches)
    assert (contents.end, contents.is_cut, contents.header) == (len(data), False, HEADER)


@given(histories)
def test_a_rewritten_index_has_the_same_entries(batches: list[list[DiskRecord]]) -> None:
    before = read(encoded(*batches)).entries
    data, count = encode_index(HEADER, before)
    assert entries(data) == before.puts()
    assert entries(data + encode_batch(HEADER, count, [put(0, 2**61)]))[-1] == put(0, 2**61)


def truncations(data: bytes) -> Iterator[tuple[int, bytes]]:
    for size in range(len(data)):
        yield size, data[:size]


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for place, bit in product(range(len(data)), range(8)):
        yield place, data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [truncations, flips])
def test_only_the_complete_batches_before_any_damage_are_read(
    damage: Callable[[bytes], Iterator[tuple[int, bytes]]],
) -> None:
    random, history = Random(5), list[list[DiskRecord]]()
    for key in range(4):
        slot = random.randrange(SLOTS)
        history.append([invalidate(slot), put(slot, key), use(random.randrange(SLOTS))])
    ends = [len(encoded(*history[:count])) for count in range(len(history) + 1)]
    for intact, damaged in damage(encoded(*history)):
        whole = sum(end <= intact for end in ends) - 1
        if whole < 0:
            with pytest.raises(NotAnIndex):
                read(damaged)
            continue
        contents = read(damaged)
        assert contents.entries.puts() == expected(history[:whole]), intact
        assert (contents.end, contents.is_cut) == (ends[whole], len(damaged) > ends[whole]), intact


@given(st.binary(max_size=400))
def test_any_bytes_after_the_header_can_be_read(tail: bytes) -> None:
    assert entries(encoded() + tail) == []


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(data: bytes) -> None:
    with pytest.raises(NotAnIndex):
        read(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty, or was erased by a reset"),
        (bytes(200), "it is empty, or was erased by a reset"),
        (b"OTHERIDX" + bytes(100), "it begins with b'OTHERIDX', not with b'KVOINDEX'"),
        (b"KVOINDEX\2\0\0\0" + bytes(100), "its format is version 2, not 3"),
        (encoded()[:20], "it ends after 20 bytes, in its header"),
        (encoded()[:-1], "its header is incomplete or damaged"),
        # The header claims four billion ranks, but their ids are missing.
        (encoded()[:12] + b"\xff" * 4 + encoded()[16:], "its header is incomplete or damaged"),
    ],
)
def test_bytes_that_are_not_an_index_are_reported(data: bytes, reason: str) -> None:
    with pytest.raises(NotAnIndex) as refused:
        read(data)
    assert str(refused.value) == reason


KEY = TierKey(bytes(32)).of("print")
KEYED = replace(HEADER, key=KEY)
OLD = b"h" * 16
MOVED = encode_batch(HEADER, 0, [put(1, 1)])
FOREIGN = {
    "of another generation": (HEADER, encode_batch(replace(HEADER, generation=OLD), 1, [put(1, 1)])),
    "moved": (HEADER, MOVED),
    "moved, with the right number": (HEADER, MOVED[:8] + b"\1" + MOVED[9:]),
    "without the tier key": (KEYED, encode_batch(HEADER, 1, [put(1, 1)])),
    "with the tier key, of another generation": (
        KEYED,
        encode_batch(replace(KEYED, generation=OLD), 1, [put(1, 1)]),
    ),
}


@pytest.mark.parametrize(("header", "batch"), FOREIGN.values(), ids=FOREIGN)
def test_r17_a_batch_of_another_generation_place_or_tier_key_is_not_read(
    header: IndexHeader, batch: bytes
) -> None:
    found = read_index(encoded([put(0, 0)], header=header) + batch, SLOTS, FINGERPRINT, header.key)
    assert (found.entries.puts(), found.is_cut) == ([put(0, 0)], True)


@pytest.mark.parametrize("record", [put(SLOTS, 1), invalidate(SLOTS), use(SLOTS)])
def test_entries_of_slots_outside_the_file_are_skipped(record: DiskRecord) -> None:
    assert entries(encoded([put(0, 0)], [record], [put(1, 1)])) == [put(0, 0), put(1, 1)]


def test_keys_of_any_length_up_to_the_maximum_and_with_trailing_zeros_are_read() -> None:
    keys = (b"k" * 5, b"k" * 64, b"k" + bytes(35))
    puts: list[DiskRecord] = [Put(SlotId(slot), BlockKey(key), (1, 2)) for slot, key in enumerate(keys)]
    assert entries(encoded(puts)) == puts
    with pytest.raises(DiskError, match="keys of 64 bytes, and one has 65"):
        encode_batch(HEADER, 0, [Put(SlotId(1), BlockKey(bytes(65)), (1, 2))])


def test_in_a_smaller_file_only_entries_of_its_slots_are_read() -> None:
    data = encoded([put(slot, slot) for slot in (5, 0, 1, 4)])
    found = read_index(data, 5, FINGERPRINT).entries
    assert (found.puts(), found.free(5)) == ([put(0, 0), put(1, 1), put(4, 4)], [3, 2])


def test_an_index_with_a_tier_key_is_read_with_this_key() -> None:
    data = encoded([put(0, 0)], [put(1, 1), use(0)], header=KEYED)
    found = read_index(data, SLOTS, FINGERPRINT, KEY)
    assert found.entries.puts() == [put(1, 1), put(0, 0)]
    written, batches = encode_index(found.header, found.entries)
    again = read_index(written, SLOTS, FINGERPRINT, KEY)
    assert (again.entries.puts(), batches) == ([put(1, 1), put(0, 0)], 1)


@pytest.mark.parametrize(
    "other", [None, TierKey(b"x" * 32).of("print"), TierKey(bytes(32)).of("another print")]
)
def test_r17_an_index_whose_header_was_written_without_the_tier_key_is_refused(other: TierKey | None) -> None:
    data = encoded([put(0, 0)], header=replace(HEADER, key=other))
    assert len(read_index(data, SLOTS, FINGERPRINT, other).entries) == 1
    with pytest.raises(NotAnIndex, match="its header"):
        read_index(data, SLOTS, FINGERPRINT, KEY)


@pytest.mark.parametrize("key", [None, KEY], ids=["checksum", "tier key"])
def test_r18_an_index_of_another_fingerprint_is_refused_and_its_fingerprint_is_named(
    key: TierKey | None,
) -> None:
    made = replace(HEADER, fingerprint="f" * 32, key=key)
    data = encoded([put(0, 0)], header=made)
    with pytest.raises(NotAnIndex, match=r"made for other KV, with the fingerprint 'f{32}'"):
        read_index(data, SLOTS, FINGERPRINT, key)
    renamed = data.replace(made.fingerprint.encode(), FINGERPRINT.encode())
    with pytest.raises(NotAnIndex, match="its header is incomplete or damaged"):
        read_index(renamed, SLOTS, FINGERPRINT, key)
