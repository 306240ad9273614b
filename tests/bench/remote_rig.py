"""Two ways to write and read the same bytes: through the remote tier, or only with Mooncake's or S3's client.

The remote tier copies between scattered host slots and the server, with checksums. The client copies between its
own buffers and the server. Both ways use the same number of threads, and values and batches of the same size.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvoffload.cli.exits import CommandError
from kvoffload.disk.system import aligned_buffer
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import BlockKey, JobId, SlotId
from kvoffload.model.wire import CopyJob, Direction, Tier
from kvoffload.remote.address import parse_address
from kvoffload.remote.local import LocalMooncake
from kvoffload.remote.mooncake_child import load_client
from kvoffload.remote.store import open_store
from kvoffload.remote.values import TRAILER_BYTES
from kvoffload.runtime.portal import DaemonExecutor
from kvoffload.runtime.tier_kinds import REMOTE_THREADS
from kvoffload.transfer.remote import RemoteMover, batch_blocks, remote_calls
from kvoffload.transfer.tier_jobs import TierJobs

if TYPE_CHECKING:
    from kvoffload.remote.local import LocalBucket
    from tests.bench.copy_rig import Rig

TIMEOUT_S = 60.0  # so long that slow calls are measured and do not fail
_KEY_BYTES = 33
_POLL_S = 1e-3  # more frequent polls would slow the threads down
REGIONS = 8


class Way(Protocol):
    """A way to write and read the bytes of a repeat."""

    def put(self) -> None:
        pass

    def get(self) -> None:
        """Read the bytes that the last `put` wrote."""

    def close(self) -> None:
        pass


class TierWay:
    """Writes and reads through the remote tier, from and to scattered slots of a rig.

    Args:
        url: the remote tier's URL.
        rig: the rig with the host memory.
    """

    def __init__(self, url: str, rig: Rig) -> None:
        self._rig = rig
        connect = partial(open_store, parse_address(url), TIMEOUT_S)
        threads = DaemonExecutor("bench-remote", REMOTE_THREADS)
        calls = remote_calls(connect, threads, time.monotonic, TIMEOUT_S, side="bench")
        mover = RemoteMover(0, 1, rig.arena)
        self._copies = TierJobs(Tier.REMOTE, calls, mover, rig.arena.layout.slot_bytes, time.monotonic)
        self._calls = calls
        self._namespace = f"bench/{secrets.token_hex(16)}"
        self._draw = random.Random(0)
        self._jobs = 0
        self._slots: list[int] = []
        self._keys: list[BlockKey] = []
        until = time.monotonic() + TIMEOUT_S
        while not self._calls.works:
            self._calls.poll()
            if time.monotonic() > until:
                raise CommandError(f"{url} does not answer")
            time.sleep(_POLL_S)

    def put(self) -> None:
        self._slots = self._draw.sample(range(self._rig.blocks), self._rig.count)
        self._keys = [BlockKey(secrets.token_bytes(_KEY_BYTES)) for _ in self._slots]
        self._job(Direction.STORE)

    def get(self) -> None:
        self._job(Direction.LOAD)

    def check(self) -> None:
        """Put blocks, clear their host slots, get the blocks into the same slots, and compare.

        Raises:
            CommandError: a byte differs.
        """
        self.put()
        pages = [page for slot in self._slots for page in self._rig.arena.pages(slot)]
        before = [page.tobytes() for page in pages]
        for page in pages:
            page[:] = bytes(len(page))
        self.get()
        if [page.tobytes() for page in pages] != before:
            raise CommandError("bytes that came from the store differ from those that were written")

    def close(self) -> None:
        self._copies.close()

    def _job(self, way: Direction) -> None:
        self._jobs += 1
        slots = tuple(map(SlotId, self._slots))
        keys = tuple(self._keys)
        self._copies.submit(CopyJob(JobId(self._jobs), way, Tier.REMOTE, slots, keys, self._namespace))
        while (found := self._copies.take()) is None or not found.jobs:
            time.sleep(_POLL_S)
        (report,) = found.jobs
        if report.outcome is not CopyOutcome.DONE or report.missing or report.corrupt:
            lost = f"{len(report.missing)} blocks missing, {len(report.corrupt)} blocks wrong"
            raise CommandError(f"a {way.value} of the store ended as {report.outcome.value}, {lost}")


class ClientWay(ABC):
    """Writes and reads only with the server's client, in batches, on as many threads as the remote tier has.

    Args:
        rig: the rig that determines the size and number of blocks.
    """

    def __init__(self, rig: Rig) -> None:
        self._value_bytes = rig.layout.slot_bytes + TRAILER_BYTES
        self._batch = batch_blocks(rig.layout)
        self._blocks = rig.count
        self._threads = ThreadPoolExecutor(REMOTE_THREADS)
        self._own = threading.local()
        self._run = ""

    def put(self) -> None:
        self._run = secrets.token_hex(8)
        self._each(self._put)

    def get(self) -> None:
        self._each(self._get)

    def close(self) -> None:
        self._threads.shutdown()

    @abstractmethod
    def clear(self) -> None:
        pass

    def _each(self, call: Callable[[int, Sequence[memoryview]], None]) -> None:
        starts = range(0, self._blocks, self._batch)
        done = [self._threads.submit(self._with_values, call, start) for start in starts]
        for each in done:
            each.result()

    def _with_values(self, call: Callable[[int, Sequence[memoryview]], None], start: int) -> None:
        buffer = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = aligned_buffer(self._batch * self._value_bytes)
            buffer[:] = random.Random(start).randbytes(len(buffer))
            self._register(buffer)
        count = min(self._batch, self._blocks - start)
        call(start, [buffer[at * self._value_bytes :][: self._value_bytes] for at in range(count)])

    def _register(self, buffer: memoryview) -> None:  # noqa: B027  # not every client needs it
        pass

    @abstractmethod
    def _put(self, start: int, values: Sequence[memoryview]) -> None: ...

    @abstractmethod
    def _get(self, start: int, values: Sequence[memoryview]) -> None: ...


class MooncakeClient(ClientWay):
    """Uses Mooncake's client. `clear` removes all of the server's objects, so the server must have no other user."""

    def __init__(self, server: LocalMooncake, rig: Rig) -> None:
        super().__init__(rig)
        self._client = load_client().MooncakeDistributedStore()
        master = f"127.0.0.1:{server.port}"
        self._check(self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**24, "tcp", "", master))

    def close(self) -> None:
        super().close()
        self._client.close()

    def clear(self) -> None:
        self._client.remove_all(True)

    def _register(self, buffer: memoryview) -> None:
        self._check(self._client.register_buffer(*_pointers([buffer]), len(buffer)))

    def _put(self, start: int, values: Sequence[memoryview]) -> None:
        names = [f"{self._run}/{start + at}" for at in range(len(values))]
        sizes = [len(value) for value in values]
        self._check(*self._client.batch_put_from(names, _pointers(values), sizes))

    def _get(self, start: int, values: Sequence[memoryview]) -> None:
        names = [f"{self._run}/{start + at}" for at in range(len(values))]
        sizes = [len(value) for value in values]
        codes = self._client.batch_get_into(names, _pointers(values), sizes)
        self._check(*[code - size for code, size in zip(codes, sizes, strict=True)])

    @staticmethod
    def _check(*codes: int) -> None:
        if any(codes):
            raise CommandError(f"Mooncake's client fails (code {next(filter(None, codes))})")


class BucketClient(ClientWay):
    """Uses an S3 client. A batch is one object, as in the remote tier, and a get reads the object's ranges."""

    def __init__(self, server: LocalBucket, rig: Rig) -> None:
        import obstore
        from obstore.store import S3Store

        super().__init__(rig)
        self._obstore: Any = obstore
        limit = timedelta(seconds=TIMEOUT_S)
        self._bucket = S3Store("blocks", client_options={"timeout": limit, "allow_http": True})

    def clear(self) -> None:
        names = [entry["path"] for page in self._obstore.list(self._bucket) for entry in page]
        if names:
            self._obstore.delete(self._bucket, names)

    def _put(self, start: int, values: Sequence[memoryview]) -> None:
        whole: memoryview = self._own.buffer[: len(values) * self._value_bytes]
        self._obstore.put(self._bucket, f"client/{self._run}-{start}", whole)

    def _get(self, start: int, values: Sequence[memoryview]) -> None:
        starts = [at * self._value_bytes for at in range(len(values))]
        sizes = [len(value) for value in values]
        name = f"client/{self._run}-{start}"
        found = self._obstore.get_ranges(self._bucket, name, starts=starts, lengths=sizes)
        if [len(part) for part in found] != sizes:
            raise CommandError("the bucket's client has not delivered everything")


def _pointers(buffers: Sequence[memoryview]) -> list[int]:
    return [int(np.frombuffer(buffer, np.uint8).ctypes.data) for buffer in buffers]
