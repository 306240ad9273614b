"""An S3 bucket as a remote tier. Each put writes one object, called a pack: an index followed by values (`packs.py`).

    <prefix>kvo1/<fingerprint>/<generation>/<rank>of<ranks>/<window>/<moment>-<random>-<bytes of the index>

Many blocks share an object, because objects are expensive and blocks are small. So blocks cannot be looked up in the
bucket by name. Instead, each connection looks them up in a catalogue of the packs that it has found. At most once a
second, it lists the newest packs and one page of older packs, and reads the indexes of packs that are not in the
catalogue. If a read finds that the bucket has deleted a pack, or that another writer has truncated the pack, the
catalogue drops the pack.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote.address import BucketAddress
from kvoffload.remote.client import MISSING, Refusals, log
from kvoffload.remote.packs import (
    CLOCKS_DIFFER_MS,
    BadPackError,
    Catalogue,
    Place,
    index_bytes,
    index_of,
    new_name,
    place_at,
    places_in,
    window_of,
)
from kvoffload.remote.s3_errors import AnsweredError, BadNameError, translated
from kvoffload.remote.values import FORMAT, Shard

LOOK_PERIOD_S = 1.0
"""Seconds between two listings of new packs. A pack of another engine is found only after the next listing."""
_PAGE = 1000  # the maximum number of names that S3 returns in one page of a listing
_INDEXES_AT_ONCE = 128  # how many indexes are read at the same time; a page of 1,000 packs takes eight rounds
# How many catalogues to keep. After a reset, the new namespace needs a second catalogue.
_MOST_SHARDS = 2
_SMALL_BYTES = 256  # how many bytes to read, at most, of an object that is not a pack
# How many characters of an object's name to log, at most: any writer may have chosen the name.
_LOGGED_CHARACTERS = 100
_GAP_BYTES = 2**20  # values with a larger gap between them are read by separate requests
_LOOK = f"{FORMAT}/look"  # name of the object that the first look creates
_NO_CONDITION = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_IMPLEMENTED)
_EXISTS = (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED)
# After these statuses, the same read might succeed. After other statuses from 400 to 499, it would fail again.
_LATER = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_INSTALL = "the object store's client cannot be loaded ({}); pip install 'kvoffload[s3]'"

T = TypeVar("T")


class _Run(NamedTuple):
    """The values of one pack that are read by one request."""

    pack: str
    start: int
    size: int
    parts: list[tuple[int, Place]]


class BucketStore:
    """A connection to an S3 bucket.

    Args:
        address: the bucket's address.
        timeout_s: how many seconds each request may take.

    Raises:
        RemoteError: the client is not installed, or environment variables contradict each other.
    """

    def __init__(self, address: BucketAddress, timeout_s: float) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise RemoteError(_INSTALL.format(error)) from error
        self._obstore = obstore
        self._address = address
        self._timeout_s = timeout_s
        self._listing_s = timeout_s / 2  # seconds after which a listing reads no further indexes
        self.refusals = Refusals()
        self._is_repeating = False  # whether a listing began before the place that it was asked for
        self._lock = threading.Lock()
        self._catalogues: dict[Shard, Catalogue] = {}
        limit = timedelta(seconds=timeout_s)
        # If the client gets options, it ignores AWS_ALLOW_HTTP, so pass the variable's value as an option.
        allows_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
        with translated(self._address):
            self._bucket = S3Store(
                address.bucket,
                prefix=address.prefix.rstrip("/") or None,
                client_options={"timeout": limit, "connect_timeout": limit, "allow_http": allows_http},
                retry_config={"max_retries": 1, "retry_timeout": limit},
            )

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        places = self._looked(shard, frozenset()).places
        return [key in places for key in keys]

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        catalogue = self._catalogue(shard)
        if not catalogue.places.keys() >= set(keys):
            # A listing may take as long as reading a value, so list only if a key is not in the catalogue.
            self._looked(shard, set(keys))
        arrived = dict.fromkeys(range(len(keys)), MISSING)
        by_pack: dict[str, list[tuple[int, Place]]] = {}
        for position, key in enumerate(keys):
            place = catalogue.places.get(key)
            if place is not None and place.size == len(buffers[position]):
                by_pack.setdefault(place.pack, []).append((position, place))
            elif place is not None:  # do not read a value of another size, because it may be huge
                arrived[position] = place.size
        runs = [run for pack, parts in by_pack.items() for run in _runs(pack, parts)]
        reads = [self._read_range(*run[:3]) for run in runs]
        for run, data in zip(runs, _at_once(reads), strict=True):
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
            index, entries = index_of(new)
            pack = new_name(catalogue.folder, _now_ms(), index)
            try:
                with translated(self._address):
                    self._obstore.put(self._bucket, pack, _joined([index, *new.values()]))
            except AnsweredError as error:
                self.refusals.note(str(error), error.fault)
                return [key not in new for key in keys]
            self.refusals.note(None)
            with self._lock:
                catalogue.add(pack, {key: Place(pack, *place) for key, *place in entries})
        return [True] * len(keys)

    def read(self, name: str) -> bytes | None:
        [data] = _at_once([self._read_range(name, 0, _SMALL_BYTES)])
        return None if data is None else bytes(data)

    def create(self, name: str, data: bytes) -> None:
        self._create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        with translated(self._address):
            self._obstore.put(self._bucket, name, data)

    def first_look(self) -> list[str]:
        """Try what an engine needs of the server: a conditional write, a read of a range and a listing from a place.

        Returns:
            What the server lacks, if an engine can do without it.

        Raises:
            RemoteError: an engine cannot use the server.
        """
        lacks = list[str]()
        try:
            # A server with conditional writes refuses the second write, and the first one if the object exists.
            if not any(self._create(_LOOK, _LOOK.encode()) for _ in range(2)):
                lacks.append(
                    f"{self._address} has no conditional writes: engines that start in the same second may share nothing for 30 s"
                )
        except AnsweredError as error:
            # A server that refuses writes can be read. The first put logs why it refuses them.
            if error.status == HTTPStatus.NOT_FOUND:
                raise
        _at_once([self._read_range(_LOOK, 1, 1)])
        place = f"{_LOOK}~"
        with suppress(BadNameError):
            if any(name < place for name, _ in self._list(f"{FORMAT}/", place)):
                lacks.append(self._repeats())
        return lacks

    def register(self, buffer: memoryview) -> None:
        """Do nothing, because the client can use any memory."""

    def close(self) -> None:
        """Do nothing, because no connection is kept open."""

    def _create(self, name: str, data: bytes) -> bool:
        """Write a small object if it does not exist.

        A server that refuses conditional writes gets a write without a condition, which may replace another writer's
        object.

        Returns:
            Whether the server has kept an existing object.
        """
        try:
            with translated(self._address):
                self._obstore.put(self._bucket, name, data, mode="create")
        except AnsweredError as error:
            if error.status in _NO_CONDITION:
                self.replace(name, data)
            elif error.status in _EXISTS:
                return True
            else:
                raise
        return False

    # -- the catalogue ------------------------------------------------------------------------------------------

    def _catalogue(self, shard: Shard) -> Catalogue:
        with self._lock:
            if shard not in self._catalogues and len(self._catalogues) >= _MOST_SHARDS:
                del self._catalogues[next(iter(self._catalogues))]
            folder = f"{FORMAT}/{shard.namespace}/{shard.part}/"
            return self._catalogues.setdefault(shard, Catalogue(folder))

    def _looked(self, shard: Shard, wanted: Set[BlockKey]) -> Catalogue:
        """Return the shard's catalogue after looking for new packs.

        New packs are looked for only if `LOOK_PERIOD_S` has passed since the last time.

        Args:
            shard: the shard of the catalogue.
            wanted: keys that the bucket should have. Older packs are listed until these keys are found or the time
                limit is reached.
        """
        catalogue, until = self._catalogue(shard), time.monotonic() + self._listing_s
        with catalogue.looking:
            now = time.monotonic()
            if now - catalogue.looked_at >= LOOK_PERIOD_S:
                self._look(catalogue, until)
                catalogue.looked_at = now
            while catalogue.walked_to and not catalogue.places.keys() >= wanted and time.monotonic() < until:
                self._walk(catalogue, catalogue.walked_to, until)
        return catalogue

    def _look(self, catalogue: Catalogue, until: float) -> None:
        """List the newest packs. If a walk through older packs is under way, list its next page too.

        Packs are ignored if their names have a time that is more than `CLOCKS_DIFFER_MS` in the future.
        """
        now_ms, goes_on = _now_ms(), catalogue.walked_to is not None
        newest = place_at(catalogue.folder, now_ms + CLOCKS_DIFFER_MS)
        page, ends = self._page(catalogue, newest)
        listed_to = self._read_indexes(catalogue, page, until) or ends
        catalogue.newest_listed(page[0][0] if page else newest, listed_to, now_ms)
        if goes_on and catalogue.walked_to is not None:
            self._walk(catalogue, catalogue.walked_to, until)

    def _walk(self, catalogue: Catalogue, walked_to: str, until: float) -> None:
        """List the page of older packs that follows `walked_to`, and read their indexes. Stop reading at `until`."""
        page, ends = self._page(catalogue, walked_to)
        catalogue.walk_listed(self._read_indexes(catalogue, page, until) or ends)

    def _page(self, catalogue: Catalogue, place: str) -> tuple[list[tuple[str, int]], str | None]:
        """List the page of objects that follows a place in the listing.

        Returns:
            The objects' names and sizes, and the place where the page ends. This place is None at the listing's end.
        """
        ends: str | None = None
        try:
            page = self._list(catalogue.folder, place)
        except BadNameError:
            # The client does not say which name it rejected, so list only one window to skip as little as possible.
            window, ends = window_of(catalogue.folder, place)
            try:
                page = self._list(window, place)
            except BadNameError as error:
                page = []
                if ends is not None and catalogue.is_new(ends):
                    # Record the window's end as a pack without blocks, so that the next listing does not warn again.
                    catalogue.add(ends, {})
                    log.warning("remote_window_skipped", window=window, reason=str(error))
        ends = page[-1][0] if len(page) == _PAGE else ends
        if ends is not None and ends <= place:
            if not self._is_repeating:
                log.warning("remote_server_lacks", note=self._repeats())
            ends = None
        return page, ends

    def _repeats(self) -> str:
        """Note that the server's listings do not advance, and return a warning for the operator."""
        self._is_repeating = True
        return f"{self._address} ignores start-after in listings: only the first {_PAGE:,} packs are found"

    def _list(self, folder: str, place: str) -> list[tuple[str, int]]:
        """Return the names and sizes of the objects that follow a place in a folder's listing, at most one page."""

        async def first() -> list[tuple[str, int]]:
            with translated(self._address):
                async for page in self._obstore.list(self._bucket, folder, offset=place, chunk_size=_PAGE):
                    return [(entry["path"], entry["size"]) for entry in page]
            return []

        try:
            return asyncio.run(asyncio.wait_for(first(), self._timeout_s))
        except TimeoutError:
            raise RemoteError(f"{self._address}: its listing does not end", RemoteFault.TIMEOUT) from None

    def _read_indexes(
        self, catalogue: Catalogue, page: Sequence[tuple[str, int]], until: float
    ) -> str | None:
        """Add the new packs on a page to a catalogue. If `until` is reached first, return the last pack added."""
        new = [entry for entry in page if catalogue.is_new(entry[0])]
        bad = list[tuple[str, str]]()
        read_to = None
        for first in range(0, len(new), _INDEXES_AT_ONCE):
            if first and time.monotonic() >= until:
                read_to = new[first - 1][0]
                break
            some = new[first : first + _INDEXES_AT_ONCE]
            faults = _at_once([self._read_index(catalogue, *entry) for entry in some])
            bad += [(pack, fault) for (pack, _), fault in zip(some, faults, strict=True) if fault]
        if bad:
            first_bad = ascii(bad[0][0].removeprefix(catalogue.folder))[:_LOGGED_CHARACTERS]
            log.warning("remote_packs_skipped", packs=len(bad), first=first_bad, reason=bad[0][1])
        return read_to

    async def _read_index(self, catalogue: Catalogue, pack: str, size: int) -> str:
        """Add a pack to a catalogue after reading its index. Return why the blocks cannot be used; "" if they can."""
        places, fault = dict[BlockKey, Place](), ""
        try:
            index = await self._read_range(pack, 0, index_bytes(pack.removeprefix(catalogue.folder), size))
            if index is not None:
                places = places_in(pack, index, size)
        except BadPackError as error:
            fault = str(error)
        except AnsweredError as error:
            if not 400 <= error.status < 500 or error.status in _LATER:
                raise
            fault = str(error)
        with self._lock:
            catalogue.add(pack, places)
        return fault

    async def _read_range(self, pack: str, start: int, size: int) -> memoryview | None:
        """Return the bytes that an object has of a range; None if the object does not exist.

        The client's `get_ranges` is not used, because it panics if a range lies beyond the object's end.
        """
        try:
            with translated(self._address):
                return memoryview(
                    await self._obstore.get_range_async(self._bucket, pack, start=start, length=size)
                )
        except AnsweredError as error:
            if error.is_missing:
                return None
            if error.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return memoryview(b"")


def _joined(parts: Sequence[bytes | memoryview]) -> memoryview:
    """Join the parts by numpy, which releases the GIL while it copies. `bytes.join` holds the GIL."""
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data


def _at_once(reads: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the reads at the same time, and return their results in the order of the reads.

    If reads fail, raise the first failure only once all reads have ended. A read that outlives its event loop makes the
    client print a traceback.
    """

    async def gather() -> list[T | BaseException]:
        return await asyncio.gather(*reads, return_exceptions=True)

    results = list[T]()
    for result in asyncio.run(gather()):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _now_ms() -> int:
    return time.time_ns() // 10**6


def _runs(pack: str, parts: list[tuple[int, Place]]) -> list[_Run]:
    """Group a pack's values, so that values close to each other are read by one request."""
    groups = list[list[tuple[int, Place]]]()
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
    """Copy the values in `data` into the buffers. Return how many bytes of each value arrived, by the value's position.

    numpy makes the copies, because it releases the GIL while it copies. A memoryview holds the GIL.
    """
    arrived = dict[int, int]()
    for position, place in run.parts:
        value = data[place.start - run.start :][: place.size]
        arrived[position] = len(value)
        if len(value) == place.size:
            np.frombuffer(buffers[position], np.uint8)[:] = np.frombuffer(value, np.uint8)
    return arrived
