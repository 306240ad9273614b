"""An S3 bucket as a remote store: one put is one object, a pack of values with an index before them.

    <prefix>kvo1/<fingerprint>/<generation>/<rank>of<ranks>/<time>-<random>-<size of the index>
    | index: count, then key, offset and length of each value; XXH3 | values ... |

Objects are expensive and blocks are small, so many blocks share an object, and the bucket cannot be asked for a block by name. Instead
each connection keeps a catalogue: it lists the packs written since its last listing, reads their indexes, and answers from them. Where
there are too many new packs for one call, the oldest are read, and the next calls go on. A pack that has expired by the bucket's rules,
or that another writer has cut short, is forgotten when a read finds it so.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import BucketAddress
from kvoffload.remote.store import MISSING, Refusals
from kvoffload.remote.values import FORMAT, Shard

MOST_BLOCKS = 2**20
"""Blocks in a connection's catalogue; the oldest packs are forgotten first."""
LOOK_PERIOD_S = 1.0
"""Seconds between two listings: what others have written since the last one is not found yet."""
_CLOCKS_DIFFER_MS = 600_000  # most that the clocks of two writers differ
_READS_AT_ONCE = 32
_GAP_BYTES = 2**20  # between values that are read as one
_ENTRY = struct.Struct("<HQQ")
_COUNT = struct.Struct("<I")
_SUM_BYTES = 8
_STATUS = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_REASON = re.compile(r"kind: (\w+)[^{]*source: reqwest|InvalidCertificate\(\s*(\w+)|\"(dns error)\"")
_NAME = re.compile(r"[0-9a-f]{12}-[0-9a-f]{16}-([0-9]{1,9})")
_INSTALL = "the object store's client cannot be loaded ({}); install kvoffload[s3]"


class _AnsweredError(RemoteError):
    """Raised when the server answers, and refuses."""


class _BeyondEndError(Exception):
    """Raised when an object ends before the range that is read."""


class _Place(NamedTuple):
    pack: str
    start: int
    size: int


class _Run(NamedTuple):
    """Values of a pack that are read as one."""

    pack: str
    start: int
    size: int
    parts: list[tuple[int, _Place]]


class _Catalogue:
    """Where the values of one shard lie, as far as the bucket was listed."""

    def __init__(self) -> None:
        self.places: dict[BlockKey, _Place] = {}
        self.packs: dict[str, list[BlockKey]] = {}  # the oldest first
        self.looked_at = float("-inf")

    def add(self, pack: str, places: dict[BlockKey, _Place]) -> None:
        self.packs[pack] = list(places)
        self.places.update(places)
        while len(self.places) > MOST_BLOCKS and len(self.packs) > 1:
            self.forget(next(iter(self.packs)))

    def forget(self, pack: str) -> None:
        for key in self.packs.pop(pack, ()):
            place = self.places.get(key)
            if place is not None and place.pack == pack:  # two writers may have put one key
                del self.places[key]

    def condemn(self, pack: str) -> None:
        """Stop using a pack whose bytes do not match its index, and do not read that index again."""
        self.forget(pack)
        self.packs[pack] = []

    def since(self, now: int) -> int:
        """Return the time in milliseconds from which on there may be unknown packs.

        A writer whose clock is ahead must not hide what others write, so no pack counts as newer than now.
        """
        newest = max((int(pack.rpartition("/")[2][:12], 16) for pack in self.packs), default=0)
        return max(min(newest, now) - _CLOCKS_DIFFER_MS, 0)


class BucketStore:
    """A connection to a bucket.

    Args:
        address: of the part that is ours.
        timeout_s: seconds that a request may take.

    Raises:
        RemoteError: the client is not installed, or the settings in the environment do not fit together.
    """

    def __init__(self, address: BucketAddress, timeout_s: float) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import S3Store
        except ImportError as error:
            raise RemoteError(_INSTALL.format(error)) from error
        self._obstore = obstore
        self._failure, self._exists = BaseError, AlreadyExistsError
        self._address = address
        self._listing_s = timeout_s / 2  # after which no more indexes are read
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._catalogues: dict[Shard, _Catalogue] = {}
        limit = timedelta(seconds=timeout_s)
        allows_http = (
            os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
        )  # its own look is lost beside other options
        with self._translated():
            self._bucket = S3Store(
                address.bucket,
                prefix=address.prefix.rstrip("/") or None,
                client_options={"timeout": limit, "connect_timeout": limit, "allow_http": allows_http},
                retry_config={"max_retries": 1, "retry_timeout": limit},
            )

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        places = self._looked(shard).places
        return [key in places for key in keys]

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        catalogue = self._catalogue(shard)
        if not catalogue.places.keys() >= set(keys):  # a listing may take as long as the read of a value
            self._looked(shard)
        arrived = dict.fromkeys(range(len(keys)), MISSING)
        by_pack: dict[str, list[tuple[int, _Place]]] = {}
        for position, key in enumerate(keys):
            place = catalogue.places.get(key)
            if place is not None and place.size == len(buffers[position]):
                by_pack.setdefault(place.pack, []).append((position, place))
            elif place is not None:  # it cannot be the value, and may be as large as another writer likes
                arrived[position] = place.size
        runs = [run for pack, parts in by_pack.items() for run in _runs(pack, parts)]
        for run, data in zip(runs, self._read_ranges([run[:3] for run in runs]), strict=True):
            if data is None:
                with self._lock:
                    catalogue.forget(run.pack)
                continue
            arrived.update(_take(run, data, buffers))
            if len(data) < run.size:
                with self._lock:
                    catalogue.condemn(run.pack)
        return list(arrived.values())

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        catalogue = self._catalogue(shard)
        new = {key: value for key, value in zip(keys, values, strict=True) if key not in catalogue.places}
        if new:
            index, entries = _index_of(new)
            pack = f"{_folder(shard)}{_now_ms():012x}-{secrets.token_hex(8)}-{len(index)}"
            try:
                with self._translated():
                    self._obstore.put(self._bucket, pack, _joined([index, *new.values()]))
            except _AnsweredError as error:
                self._refusals.note(str(error))
                return [key not in new for key in keys]
            self._refusals.note(None)
            with self._lock:
                catalogue.add(pack, {key: _Place(pack, *place) for key, *place in entries})
        return [True] * len(keys)

    def read(self, name: str) -> bytes | None:
        with self._translated(), suppress(FileNotFoundError):
            return bytes(self._obstore.get(self._bucket, name).bytes())
        return None

    def create(self, name: str, data: bytes) -> None:
        with self._translated(), suppress(self._exists):
            self._obstore.put(self._bucket, name, data, mode="create")

    def replace(self, name: str, data: bytes) -> None:
        with self._translated():
            self._obstore.put(self._bucket, name, data)

    def register(self, buffer: memoryview) -> None:
        """Any memory serves."""

    def close(self) -> None:
        """There is no connection to end."""

    # -- the catalogue ------------------------------------------------------------------------------------------

    def _catalogue(self, shard: Shard) -> _Catalogue:
        with self._lock:
            return self._catalogues.setdefault(shard, _Catalogue())

    def _looked(self, shard: Shard) -> _Catalogue:
        """Return the shard's catalogue; list the bucket first, unless that was done a moment ago."""
        catalogue, now = self._catalogue(shard), time.monotonic()
        with self._lock:
            is_recent = now - catalogue.looked_at < LOOK_PERIOD_S
            since, known = catalogue.since(_now_ms()), set(catalogue.packs)
        if is_recent:
            return catalogue
        folder = _folder(shard)
        with self._translated():
            pages = list(self._obstore.list(self._bucket, folder, offset=f"{folder}{since:012x}"))
        new = [
            (entry["path"], entry["size"]) for page in pages for entry in page if entry["path"] not in known
        ]
        for first in range(0, len(new), _READS_AT_ONCE):
            if first and time.monotonic() - now >= self._listing_s:
                return catalogue  # the next call goes on
            self._read_indexes(catalogue, new[first : first + _READS_AT_ONCE])
        catalogue.looked_at = now
        return catalogue

    def _read_indexes(self, catalogue: _Catalogue, packs: Sequence[tuple[str, int]]) -> None:
        """Add packs, given with their sizes, to a catalogue."""
        names = [(pack, size, _NAME.fullmatch(pack.rpartition("/")[2])) for pack, size in packs]
        ours = [(pack, size, int(name[1])) for pack, size, name in names if name is not None]
        indexes = self._read_ranges([(pack, 0, index_bytes) for pack, _, index_bytes in ours])
        for (pack, size, _), index in zip(ours, indexes, strict=True):
            places = _places_in(pack, index or b"")
            is_whole = all(place.start + place.size <= size for place in places.values())
            with self._lock:
                catalogue.add(pack, places if is_whole else {})

    def _read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview | None]:
        """Read ranges of packs side by side, each given by its pack, start and size.

        Returns:
            their bytes, fewer where a pack ends before, None where it is gone.
        """

        async def read() -> list[memoryview | None]:
            free = asyncio.Semaphore(_READS_AT_ONCE)

            async def one(pack: str, start: int, size: int) -> memoryview | None:
                async with free:
                    return await self._read_range(pack, start, size)

            return await asyncio.gather(*[one(*each) for each in ranges])

        return asyncio.run(read())

    async def _read_range(self, pack: str, start: int, size: int) -> memoryview | None:
        """The client's own `get_ranges` panics where an object ends before the range."""
        try:
            with self._translated():
                return memoryview(
                    await self._obstore.get_range_async(self._bucket, pack, start=start, length=size)
                )
        except FileNotFoundError:
            return None
        except _BeyondEndError:
            return memoryview(b"")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Name only the kind of an error and the status: a server's answer may repeat a credential's name."""
        try:
            yield
        except self._failure as error:
            text = str(error)
            if (status := _STATUS.search(text)) is None:
                raise RemoteError(f"{self._address} fails: {_reason(error)}") from None
            if status[1].startswith("416"):
                raise _BeyondEndError from None
            raise _AnsweredError(f"{self._address} fails: {type(error).__name__}, {status[1]}") from None


def _reason(error: Exception) -> str:
    """Return the words of an error that the client itself uses."""
    words = [word for found in _REASON.findall(str(error)) for word in found if word]
    return ", ".join([type(error).__name__, *words])


def _joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """Return these bytes as one piece. numpy copies without the interpreter's lock, `join` with it."""
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data


def _folder(shard: Shard) -> str:
    return f"{FORMAT}/{shard.namespace}/{shard.part}/"


def _now_ms() -> int:
    return time.time_ns() // 10**6


def _runs(pack: str, parts: list[tuple[int, _Place]]) -> list[_Run]:
    """Group the values of one pack: those that lie close to each other are read as one."""
    groups = list[list[tuple[int, _Place]]]()
    end = 0
    for part in sorted(parts, key=lambda part: part[1].start):
        if not groups or part[1].start - end > _GAP_BYTES:
            groups.append([])
        groups[-1].append(part)
        end = part[1].start + part[1].size
    return [
        _Run(pack, group[0][1].start, group[-1][1].start + group[-1][1].size - group[0][1].start, group)
        for group in groups
    ]


def _take(run: _Run, data: memoryview, buffers: Sequence[memoryview]) -> dict[int, int]:
    """Copy a run's values into the buffers; return the bytes that arrived, by position.

    numpy copies them without the interpreter's lock, a memoryview with it.
    """
    arrived = dict[int, int]()
    for position, place in run.parts:
        value = data[place.start - run.start :][: place.size]
        arrived[position] = len(value)
        if len(value) == place.size:
            np.frombuffer(buffers[position], np.uint8)[:] = np.frombuffer(value, np.uint8)
    return arrived


def _index_of(values: Mapping[BlockKey, memoryview]) -> tuple[bytes, list[tuple[BlockKey, int, int]]]:
    """Return a pack's index, and what it says: each value's key, offset and length."""
    size = _COUNT.size + sum(_ENTRY.size + len(key) for key in values) + _SUM_BYTES
    entries, start = list[tuple[BlockKey, int, int]](), size
    for key, value in values.items():
        entries.append((key, start, len(value)))
        start += len(value)
    parts = [_ENTRY.pack(len(key), *place) + key for key, *place in entries]
    index = b"".join([_COUNT.pack(len(entries)), *parts])
    return index + xxh3_64_digest(index), entries


def _places_in(pack: str, index: bytes | memoryview) -> dict[BlockKey, _Place]:
    """Return where a pack's values lie; nothing if the index is incomplete."""
    places: dict[BlockKey, _Place] = {}
    if xxh3_64_digest(index[:-_SUM_BYTES]) != index[-_SUM_BYTES:]:
        return places
    at = _COUNT.size
    for _ in range(_COUNT.unpack_from(index)[0]):
        length, start, size = _ENTRY.unpack_from(index, at)
        at += _ENTRY.size + length
        places[BlockKey(bytes(index[at - length : at]))] = _Place(pack, start, size)
    return places
