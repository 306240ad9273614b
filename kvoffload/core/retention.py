"""Keeps slots that a request stored or hit out of the eviction order while the request needs them (R8, R15).

A request's slots are released together, the deepest first, when the request has no block table any more and its last
job has ended. If each store released its own slots, a prefix's head would be evicted before its tail, which is useless
without the head. For the same reason, blocks that the request used but another request stored are marked as used when
the slots are released.

A recurrent state counts as used only when it is stored or loaded. A conversation's next turn reads the state of the
last turn once, on the device, and leaves a deeper state. If that read counted, states that no turn reads again would
push out other states.

When a session has ended, blocks that no other session has used leave the host early. A session's blocks are those that
its requests stored; each use by a request of another session, or of none, ends this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from operator import itemgetter

from kvoffload.core.jobs import Store
from kvoffload.core.machine import RequestState
from kvoffload.core.request import RequestRecord
from kvoffload.core.slots import SlotPool
from kvoffload.core.tally import Tally
from kvoffload.core.tiers import LowerTier
from kvoffload.model.engine import EngineShape
from kvoffload.model.events import SessionEnded
from kvoffload.model.groups import AttentionKind
from kvoffload.model.ids import BlockKey, SlotId

_FINISHING = RequestState.FINISHING


class Retention:
    """Holds and releases the slots of requests.

    The only caller of `SlotPool.hold` and `SlotPool.release`, and the only writer of `RequestRecord.held`, `held_to`
    and `shares`.
    """

    def __init__(
        self, pool: SlotPool, shape: EngineShape, tiers: tuple[LowerTier, ...], tally: Tally
    ) -> None:
        self._pool = pool
        self._tally = tally
        self._tiers = tiers
        self._shape = shape
        self._groups = shape.groups
        self._block_tokens = shape.block_tokens

    def add(self, record: RequestRecord, slots: Sequence[SlotId]) -> None:
        """Hold the slots of a load, heads first.

        If held slots would fill more than three quarters of the host, hold only blocks that no lower tier has. So there
        is always room for stores and for other requests' fetches.
        """
        if self._tiers:
            slots = self._fitting(record, slots)
        self._pool.hold(slots)
        record.held += slots

    def _fitting(self, record: RequestRecord, slots: Sequence[SlotId]) -> Sequence[SlotId]:
        pool = self._pool
        room = max(pool.capacity - (pool.capacity // 4 or 1) - len(pool.holds), 0)
        if len(slots) <= room:
            return slots
        record.shares = True
        indexes = [tier.pool.index for tier in self._tiers]
        rest = [slot for slot in slots[room:] if not any(pool.key(slot) in index for index in indexes)]
        return [*slots[:room], *rest]

    def keep(self, record: RequestRecord, slots: Sequence[SlotId]) -> None:
        """Hold slots of a request's prefix until the request has no block table and no open job."""
        self._pool.hold(slots)
        record.held += slots

    def share(self, record: RequestRecord) -> None:
        """Record that a request uses a block that another request stored."""
        record.shares = True

    def arrived(self, job: Store) -> None:
        """Hold a store's slots for the requests whose blocks the slots contain.

        An ended request gets no more holds if one of its jobs has timed out, because holds are released when the last
        job ends, and a timed-out job may never end.
        """
        sizes, end = [group.block_tokens for group in self._groups], 0
        held: list[SlotId] = []
        groups = len(sizes)
        for keys, _, record, incarnation, places in job.offers:
            first, end = end, end + len(keys)
            if record is None or record not in job.concerns:
                continue
            # As in `depth_of`, without calls.
            tokens = places[0] // groups * sizes[places[0] % groups]
            if tokens < record.held_to or incarnation != record.incarnation:
                record.shares = True
            record.held_to = places[-1] // groups * sizes[places[-1] % groups]
            slots = job.slots[first:end]
            if record.session:
                self._pool.set_session(slots, record.session)
            if record.state < _FINISHING or (record.state is _FINISHING and not record.has_timed_out):
                record.held += slots
                held += slots
        self._pool.hold(held)

    def release_if_over(self, record: RequestRecord) -> None:
        """Release a request's slots if the request has no block table and no open job.

        After one of the request's jobs has timed out, ignore its open jobs.
        """
        is_waiting = record.table is not None or (record.jobs and not record.has_timed_out)
        if (record.held or record.shares or record.found_tokens) and not is_waiting:
            self.release(record)

    def release(self, record: RequestRecord) -> None:
        """Release all slots that a request holds. The deepest blocks will be evicted first."""
        own = self._own_slots(record) if self._pool.sessions else ()
        if self._tiers and record.loaded_tokens and record.persists:
            keys = [*self._keys(record, record.loaded_tokens, state=record.loaded_tokens)]
            keys += self._keys_of_tail(record, record.loaded_tokens)
            on_host = self._pool.index.parts
            for tier in self._tiers:
                on_tier = tier.pool.index.parts
                lacking = [key for key in reversed(keys) if key not in on_tier[key[0]]]
                tier.reuse([key for key in lacking if key in on_host[key[0]]])
        if record.tail:
            index = self._pool.index
            self._pool.use([index[key] for key in self._keys_of_tail(record, record.tail) if key in index])
        if record.shares or record.found_tokens:
            self._release_and_use(record)
            record.shares = False
        elif record.held:
            self._pool.release(record.held[::-1])
        record.held.clear()
        record.held_to = 0
        if own and record.is_last_turn and not record.is_live:
            self._tally.events.append(SessionEnded(record.request, self._pool.leave_early(own)))

    def _own_slots(self, record: RequestRecord) -> list[SlotId]:
        """Return the slots that only this request's session has used, deepest first.

        From now on, the other slots that the request used belong to no session.
        """
        used = self._slots_deepest_first(record, record.confirmed_tokens, record.held)
        inside = set(used)
        beyond = dict.fromkeys([slot for slot in reversed(record.held) if slot not in inside])
        used = [*beyond, *used]
        sessions, session = self._pool.sessions, record.session
        self._pool.set_session([slot for slot in used if sessions[slot] != session], 0)
        return [slot for slot in used if sessions[slot] == session] if session else []

    def used(self, record: RequestRecord, tokens: int) -> None:
        """Mark the blocks of the first `tokens` tokens as used, so that they are evicted after deeper blocks."""
        self._pool.use(self._slots_deepest_first(record, tokens))

    def _release_and_use(self, record: RequestRecord) -> None:
        """Release the request's held slots and mark its other slots as used, deepest first.

        The head of the prefix, which other requests may share, becomes the most recently used.
        """
        held = record.held
        used = self._slots_deepest_first(record, record.confirmed_tokens, held)
        if held:
            # `used` lacks held slots that were invalidated or are deeper than this incarnation has reached.
            beyond = set(held).difference(used)
            if beyond:
                self._pool.release([slot for slot in reversed(held) if slot in beyond])
                held = [slot for slot in held if slot not in beyond]
        self._pool.use(used, held)

    def _slots_deepest_first(
        self, record: RequestRecord, tokens: int, held: Collection[SlotId | None] = ()
    ) -> list[SlotId]:
        """Return the slots of the whole blocks in a request's first `tokens` tokens, the deepest first.

        A recurrent state is included only if its slot is in `held`.
        """
        if not tokens:
            return []
        parts = self._pool.index.parts
        keys = reversed(self._keys(record, tokens, held))
        return [slot for key in keys if (slot := parts[key[0]].get(key)) is not None]

    def _keys_of_tail(self, record: RequestRecord, tokens: int) -> list[BlockKey]:
        keys = (self._shape.tail_key(group, record.hashes, tokens) for group in self._groups)
        return [key for key in keys if key is not None]

    def _keys(
        self, record: RequestRecord, tokens: int, held: Collection[SlotId | None] = (), state: int = 0
    ) -> Sequence[BlockKey]:
        """Return the keys of the whole blocks in a request's first `tokens` tokens, heads first.

        A recurrent state is included only if its slot is in `held`, or if it is the state after `state` tokens.
        """
        if self._block_tokens:
            count = tokens // self._block_tokens
            if len(record.keys) == 1:
                return record.keys[0][:count]
            whole_blocks = range(min(count, *map(len, record.keys)))
            return [keys[position] for position in whole_blocks for keys in record.keys]
        numbered: list[tuple[int, BlockKey]] = []
        for group, of_group in zip(self._groups, record.keys, strict=True):
            size = group.block_tokens
            whole: Iterable[tuple[int, BlockKey]] = enumerate(islice(of_group, tokens // size))
            if group.kind is AttentionKind.RECURRENT:
                whole = self._states(whole, held, state // size - 1)
            numbered += [(number * size, key) for number, key in whole]
        numbered.sort(key=itemgetter(0))
        return [key for _, key in numbered]

    def _states(
        self, numbered: Iterable[tuple[int, BlockKey]], held: Collection[SlotId | None], last: int
    ) -> Iterable[tuple[int, BlockKey]]:
        index, held = self._pool.index, frozenset(held)
        return [one for one in numbered if one[0] == last or index.get(one[1]) in held]
