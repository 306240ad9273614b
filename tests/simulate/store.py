"""A shared remote tier with random faults. The remote tier outlives engines, and other engines write under
the same names.

Calls of the remote tier take simulated time, on threads that run one at a time (`tests/simulate/disk.py`).
The engine's own thread must not call the remote tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from kvoffload.core import tiers
from kvoffload.model.errors import RemoteError
from kvoffload.model.ids import BlockKey
from kvoffload.remote import values
from kvoffload.remote.client import FAILED, MISSING
from kvoffload.remote.values import Shard
from kvoffload.runtime import remote_catalog, tier_kinds
from tests.simulate.copier import fate_of
from tests.simulate.disk import DiskPortal, SimThread

if TYPE_CHECKING:
    import random

STORE_TROUBLES: dict[str, dict[str, float]] = {
    "none": {},
    "some": {
        "error": 0.03, "late": 0.03, "untrue": 0.05, "gone": 0.05, "cut": 0.02, "flip": 0.02, "mixed": 0.02,
        "full": 0.05, "lost": 0.03,
    },
    "failing": {"error": 0.3, "torn": 0.1, "late": 0.1, "gone": 0.1},
    "lying": {"untrue": 0.3, "cut": 0.1, "flip": 0.3, "mixed": 0.2, "lost": 0.1},
    "hanging": {"hang": 0.05, "late": 0.1},
}  # fmt: skip
_FREE_FAILURES = 12
"""After this many consecutive failures, all further calls must be probes.

Three failures open a breaker, but more calls may be queued by then. Probes are at least a second apart.
"""
_PROBES_S = 0.9
_HINTS = 100


@dataclass(frozen=True)
class StoreOdds:
    """The probabilities of the remote tier's faults. Times are in seconds."""

    error: float = 0.0  # the call does nothing, and raises
    torn: float = 0.0  # the call does a part of its work, and raises
    late: float = 0.0  # the call takes about as long as its time limit, or twice as long
    hang: float = 0.0  # the call returns when the run is over
    # The remote tier reports a block that it lacks, or does not report a block that it has.
    untrue: float = 0.0
    gone: float = 0.0  # the remote tier does not deliver a value
    cut: float = 0.0  # the remote tier delivers only the beginning of a value
    flip: float = 0.0  # the remote tier delivers a value with a wrong bit
    mixed: float = 0.0  # the remote tier delivers another block's value
    full: float = 0.0  # the remote tier does not accept a value
    lost: float = 0.0  # the remote tier reports that it has accepted a value, but loses the value
    usual_s: float = 0.001  # the maximum duration of a call that is neither late nor hanging
    timeout_s: float = 1.0  # the timeout that `late` refers to


class SimStore:
    """The remote tier's server. The same object stands for every connection."""

    def __init__(self, draws: random.Random, odds: StoreOdds) -> None:
        self._draws = draws
        self._odds = odds
        self.problems: list[str] = []  # the engines' violations of the contract
        self.values: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        """all values that engines have put; `others_write` puts them again"""
        self._asked: dict[str, None] = {}
        self.is_dead = self.is_full = False
        self.replaced = 0
        # for each executor: the times of its consecutive failures
        self._failures: dict[object, list[float]] = {}

    def token_hex(self, size: int) -> str:
        """Stand in for `secrets.token_hex`."""
        return self._draws.randbytes(size).hex()

    def connect(self, address: object, timeout_s: float) -> SimStore:
        """Stand in for `open_store`."""
        self._call()
        return self

    # -- the port -------------------------------------------------------------------------------------------------

    def ask(self, shard: Shard, keys: Sequence[BlockKey]) -> list[bool]:
        self._call()
        names = [shard.name(key) for key in keys]
        self._asked.update(dict.fromkeys(names))
        return [(name in self.values) is not self._happens("untrue") for name in names]

    def get(self, shard: Shard, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[int]:
        self._call()
        return [self._deliver(shard.name(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put(self, shard: Shard, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[bool]:
        is_torn = self._call() == "torn"
        taken = []
        for key, value in zip(keys, values, strict=True):
            if is_torn and self._draws.random() < 0.5:
                continue
            is_taken = not (self.is_full or self._happens("full"))
            if is_taken and not self._happens("lost"):
                name = shard.name(key)
                self._written.setdefault(name, bytes(value))
                self.values.setdefault(name, bytes(value))
            taken.append(is_taken)
        self._raise_if(is_torn)
        return taken

    def read(self, name: str) -> bytes | None:
        self._call()
        return self.values.get(name)

    def create(self, name: str, data: bytes) -> None:
        is_torn = self._call() == "torn"
        self.values.setdefault(name, data)
        self._raise_if(is_torn)

    def replace(self, name: str, data: bytes) -> None:
        is_torn = self._call() == "torn"
        self.values[name] = data
        self.replaced += 1
        self._raise_if(is_torn)

    def register(self, buffer: memoryview) -> None:
        """Do nothing: the remote tier can use any memory."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    # -- restarts, evictions and other writers --------------------------------------------------------------------

    def restart(self) -> None:
        """Lose all values, including the generation."""
        self.values.clear()
        self.comes_back()

    def comes_back(self) -> None:
        """Answer calls and accept values again."""
        self.is_dead = self.is_full = False

    def evict(self) -> None:
        for name in self._some(list(self.values)):
            del self.values[name]

    def others_write(self) -> None:
        """Act as other engines: put our engines' values again, and wrong values under our engines' names."""
        for name in self._some([*self._written, *self._asked]):
            value = self._written.get(name, b"")
            others = list(self._written.values())
            strange = [b"", value[:-1], value + b"x", self._flipped(value)]
            strange.append(self._draws.choice(others or [b""]))
            self.values[name] = self._draws.choice([value, value, value, *strange])

    def heals(self) -> None:
        """Cause no more faults, because the run is over."""
        self._odds = StoreOdds()
        self.comes_back()

    # -- helpers --------------------------------------------------------------------------------------------------

    def _call(self) -> str:
        thread = SimThread.current()
        assert thread is not None, "the engine's thread calls the store"
        fate = fate_of(self._draws, self._odds, ("error", "torn", "late", "hang"))
        seconds = self._draws.uniform(0, self._odds.usual_s)
        self._note(thread, fails=self.is_dead or fate in ("error", "torn", "hang"))
        if fate == "late":
            seconds = self._odds.timeout_s * self._draws.choice([0.9, 1.1, 2.0])
        thread.park(None if fate == "hang" else seconds)
        self._raise_if(self.is_dead or fate == "error")
        return fate

    def _note(self, thread: SimThread, *, fails: bool) -> None:
        """Check that an engine sends only probes to a failing store."""
        failures = self._failures.setdefault(thread.owner, [])
        if not fails:
            failures.clear()
            return
        now = thread.now
        if len(failures) > _FREE_FAILURES and now - failures[-1] < _PROBES_S:
            waited_s = now - failures[-1]
            self.problems.append(
                f"after {len(failures)} failed calls, the next one comes {waited_s:.3f} s later"
            )
        failures.append(now)

    def _deliver(self, name: str, buffer: memoryview) -> int:
        value = self.values.get(name)
        if value is None:
            return MISSING
        if self._happens("gone"):
            return self._draws.choice([MISSING, FAILED])
        if self._happens("mixed"):
            value = self._draws.choice(list(self.values.values()))
        if self._happens("cut"):
            value = value[: self._draws.randrange(len(value) + 1)]
        if self._happens("flip"):
            value = self._flipped(value)
        size = min(len(value), len(buffer))
        buffer[:size] = value[:size]
        return len(value)

    def _flipped(self, value: bytes) -> bytes:
        data = bytearray(value)
        if data:
            data[self._draws.randrange(len(data))] ^= 1 << self._draws.randrange(8)
        return bytes(data)

    def _happens(self, fate: str) -> bool:
        odds: float = getattr(self._odds, fate)
        return odds > 0 and self._draws.random() < odds

    def _some(self, names: list[str]) -> list[str]:
        share = self._draws.choice([0.1, 0.5, 1.0])
        return [name for name in dict.fromkeys(names) if self._draws.random() < share]

    def _raise_if(self, fails: bool) -> None:
        if fails:
            raise RemoteError("the store does not answer")


class Awaited(Future[Any]):
    """A future for which the engine's thread waits. During the wait, time passes for the portal's threads."""

    portal: ClassVar[DiskPortal]

    def result(self, timeout: float | None = None) -> Any:  # noqa: ANN401
        self.portal.drive(self, timeout)
        return super().result(0)


@contextmanager
def in_place_of_clients(store: SimStore) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (remote_catalog, tier_kinds):
            stack.enter_context(mock.patch.object(module, "open_store", store.connect))
        # each audit checks all hints, so many hints would be slow
        stack.enter_context(mock.patch.object(tiers, "MOST_HINTS", _HINTS))
        for module in (remote_catalog, values):
            stack.enter_context(mock.patch.object(module, "secrets", store))
        stack.enter_context(mock.patch.object(remote_catalog, "Future", Awaited))
        yield
