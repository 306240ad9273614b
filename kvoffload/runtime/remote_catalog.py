"""The remote tier on the scheduler's side: which generation this engine uses, and which blocks the tier has.

    connected ─▶ the generation is read, or made by the first engine ─▶ TierOpened
    a request arrives ─▶ the tier is queried for the request's keys ─▶ TierAnswered
    every 30 s ─▶ the generation is read again ─▶ TierOpened, if the tier lost it and another engine made a new one
    reset ─▶ TierOpened with a private generation at once; the tier gets a new generation for later engines

Engines with equal fingerprints share a generation, which is a random value in the tier. After a reset an engine may
have other weights than its fingerprint says, so it uses a private generation until its process ends. The next engine to
start may be a restart of the same engine, which must find nothing from before the reset. So the reset also replaces the
value in the tier, and marks the new value.

A running engine that reads a marked value keeps its own generation. This preserves the engine's hits, and keeps blocks
from before the reset out of the generation of later engines. If the tier has lost the value, the next engine that reads
the generation makes a new one, which the other engines then use, except engines that were reset or have read a marked
value.

All values have the same length, so Mooncake writes a new one to the old one's memory. A Mooncake master that restores
an older list of its values then still finds the new value.

With a key, the value also contains a MAC and the time at which the value was made. Another writer can restore an old
value but cannot make a new one, so an engine that finds a value older than its own keeps its generation.

The only hook that waits for the tier is a reset, for as long as one call may take. If writing the new value fails, the
reset is incomplete. The value is then replaced as soon as the tier answers again, and later resets are complete at
once. An engine that has not used a shared generation yet has written nothing that later engines can find, so its resets
are always complete.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf

from kvoffload.core.tiers import Ask
from kvoffload.disk.tier_key import TierKey
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.errors import RemoteError, reason_of
from kvoffload.model.ids import BlockKey, RequestId
from kvoffload.model.wire import Tier, TransferReport
from kvoffload.remote.address import RemotePlace
from kvoffload.remote.store import RemoteStore, open_store
from kvoffload.remote.values import Generation, Shard, generation_name, new_generation, read_generation
from kvoffload.runtime.portal import Portal
from kvoffload.transfer.blocking_calls import Call
from kvoffload.transfer.remote import remote_calls

LOOK_PERIOD_S = 30.0
"""Seconds between two reads of the shared generation."""
_POLL_S = 0.02
"""Seconds between two polls of the remote tier while no call has ended.

These polls only find calls that take too long.
"""

log = get_logger("remote")


class RemoteCatalog:
    """The scheduler's part of the remote tier: the engine's generation, and queries for blocks.

    Args:
        place: the tier's address, and a function that identifies this engine's KV.
        ranks: how many ranks write a value of their own for each block.
        portal: provides threads that may wait for the tier.
        monotonic: returns the time in seconds, from a clock that never goes back.
        timeout_s: seconds after which a call to the tier has failed.
        key: authenticates the generation; None if all writers are trusted.
    """

    def __init__(
        self,
        place: RemotePlace,
        ranks: int,
        portal: Portal,
        monotonic: Callable[[], float],
        timeout_s: float,
        key: TierKey | None = None,
    ) -> None:
        self._ranks = ranks
        self._monotonic = monotonic
        self._timeout_s = timeout_s
        self._key = key
        executor = portal.new_executor("remote-catalog", threads=2)
        connect = partial(open_store, place.address, timeout_s)
        self._calls = remote_calls(connect, executor, monotonic, timeout_s, side="scheduler")
        self._due: list[facts.Fact] = []
        self.faults = self._calls.faults
        self.arrived = self._calls.ended
        """Ended calls. While there are ended calls, `take_facts` must be called."""
        self.awaits_ranks = self.is_restoring = False
        self._fingerprint: str | None = None
        self._generation: str | None = None
        self._made_ms = 0  # when the last accepted generation was made, in milliseconds
        # True if this engine keeps its generation, even if the tier has another one.
        self._is_fixed = False
        # True if later engines could find blocks of this engine in the generation that the tier has.
        self._has_shared = False
        self._looks_at = -inf
        self._must_replace = self._is_replacing = False
        self._opened: str | None = None  # the namespace last reported to the core
        # On another thread, because identifying the KV may read all weights.
        self._identified = executor.submit(place.identify)
        self._is_refused = False  # True if the KV could not be identified, so that the tier stays closed
        if place.address.caution:
            log.warning("remote_not_protected", note=place.address.caution)

    def take_facts(self) -> list[facts.Fact]:
        """Start calls that are due, and return the facts since the last call. Never waits."""
        self._calls.poll()
        if self._fingerprint is None and self._identified.done() and not self._is_refused:
            self._take_identity()
        works = self._calls.works
        if works and self._must_replace and not self._is_replacing:
            self._replace()
        is_due = not self._is_fixed and self._monotonic() >= self._looks_at
        if works and self._fingerprint is not None and is_due:
            self._looks_at = self._monotonic() + LOOK_PERIOD_S
            read = partial(_shared_generation, self._fingerprint, self._key, self._made_ms)
            self._calls.submit(read, self._generation_read)
        usable = self._namespace if works else None
        if usable != self._opened:
            self._opened = usable
            # Read the generation again, because the tier may have lost it while it did not answer.
            self._looks_at = -inf
            self._due.append(
                facts.TierLost(Tier.REMOTE) if usable is None else facts.TierOpened(Tier.REMOTE, usable)
            )
        due, self._due = self._due, []
        return due

    @property
    def opening(self) -> str | None:
        """Return the current stage of opening the tier; None if the tier is open or cannot be opened."""
        if self._namespace is not None or self._is_refused:
            return None
        return "identity of the weights" if self._fingerprint is None else "connection"

    @property
    def poll_s(self) -> float:
        return _POLL_S if self.opening is None else -inf

    def ranks_reported(self, _: Iterable[TransferReport]) -> None:
        """Do nothing: each rank has a connection of its own."""

    def send(self, asks: Sequence[Ask]) -> None:
        """Query which blocks of some requests the tier has."""
        for request, keys in asks:
            self._ask(request, keys)

    def _ask(self, request: RequestId, keys: tuple[BlockKey, ...]) -> None:
        """Query which of a request's blocks the tier has.

        The query covers only the last rank's shards. A fetch finds out if another rank's shard is missing.
        """
        namespace = self._namespace or ""
        shard = Shard(namespace, self._ranks - 1, self._ranks)

        def answered(call: Call) -> None:
            answers = list(zip(keys, call.result or (), strict=False))
            has = tuple([key for key, is_there in answers if is_there])
            lacks = tuple([key for key, is_there in answers if not is_there])
            unanswered = len(keys) - len(answers)
            self._due.append(
                facts.TierAnswered(Tier.REMOTE, request, namespace, has, lacks, unanswered, call.took)
            )

        self._calls.submit(lambda _, store: store.ask(shard, keys), answered)

    def reset(self) -> bool:
        """Discard all older blocks for this process; return True if later processes cannot find them either.

        Wait for the tier for at most the time limit of one call. After False, `take_facts` tries again.
        """
        self._generation = secrets.token_hex(16)
        self._is_fixed = True
        self._must_replace = True
        if self._calls.works and (replaced := self._replace()) is not None:
            with suppress(TimeoutError):
                self._has_shared &= not replaced.result(self._timeout_s)
        if self._has_shared:
            log.warning(
                "remote_generation_not_replaced",
                note="the remote tier does not answer; until it does, an engine that starts finds blocks from before this reset",
            )
        return not self._has_shared

    def close(self) -> None:
        """Close the connection without waiting for a call that hangs."""
        self._calls.close()

    @property
    def _namespace(self) -> str | None:
        if self._fingerprint is None or self._generation is None:
            return None
        return f"{self._fingerprint}/{self._generation}"

    def _take_identity(self) -> None:
        try:
            self._fingerprint = self._identified.result().fingerprint
        except Exception as error:
            # Identifying the KV may raise any exception, which must not reach the engine.
            reason, note = reason_of(error), "the engine continues without the remote tier"
            log.error("remote_not_opened", reason=reason, note=note)
            self._is_refused = True

    def _generation_read(self, call: Call) -> None:
        found: Generation | None = call.result
        if found is None:
            self._looks_at = self._monotonic()
        elif not self._is_fixed and found.name != self._generation:
            if found.made_ms < self._made_ms:
                self._is_fixed = True
                note = "it is older than this engine's generation: another writer put it back, or another engine's clock is slow"
                log.warning("remote_generation_refused", generation=found.name, note=note)
                return
            if self._generation is not None and found.is_after_reset:
                self._is_fixed = True
                log.info(
                    "remote_generation_kept",
                    note="another engine was reset, and no longer uses this generation",
                )
                return
            self._generation = found.name
            self._made_ms = found.made_ms
            self._has_shared = True
            log.info("remote_opened", namespace=self._namespace)

    def _replace(self) -> Future[bool] | None:
        """Start to write a new generation to the tier, for engines that start later.

        Returns:
            A future that tells whether the tier has stored the new generation; None if the KV is not identified yet.
        """
        if self._fingerprint is None:
            return None
        name, done = generation_name(self._fingerprint), Future[bool]()
        data = new_generation(name, self._key, self._made_ms, is_after_reset=True)
        self._is_replacing = True

        def replace(_: Call, store: RemoteStore) -> bool:
            is_done = False
            try:
                store.replace(name, data)
                is_done = True
            finally:
                done.set_result(is_done)
            return True

        def replaced(call: Call) -> None:
            self._is_replacing = False
            self._must_replace = not call.result
            if call.result:
                self._has_shared = False
                log.info("remote_generation_replaced")

        self._calls.submit(replace, replaced)
        return done


def _shared_generation(
    fingerprint: str, key: TierKey | None, after_ms: int, _: Call, store: RemoteStore
) -> Generation:
    """Return the generation that the tier has. If it has none, create one that is newer than `after_ms`."""
    name = generation_name(fingerprint)
    data = store.read(name)
    if data is None:
        store.create(name, new_generation(name, key, after_ms))
        data = store.read(name)
    if data is None or (found := read_generation(name, key, data)) is None:
        raise RemoteError(f"{name} in the remote tier is not a generation")
    return found
