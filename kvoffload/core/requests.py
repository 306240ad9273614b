"""Request records: where each request stands, which of its blocks are confirmed, and what was offered of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvoffload.core.states import RequestEvent, RequestState, next_request_state
from kvoffload.model.ids import BlockKey, GroupId, RequestId, SlotId

# To reach an enum's member by its class takes ten times as long.
_END = RequestEvent.END
_FINISHING = RequestState.FINISHING
_HAVE_TABLE = (RequestState.LOADING, RequestState.RUNNING)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request.

    Args:
        request: its name.
        prompt_tokens: tokens before the first new one.
        keys: per group, the keys of its whole blocks so far.
        reads_cache: False when it asked not to read cached blocks.
        incarnation: block tables it has had; jobs and offers of an earlier one no longer concern it.
        found_tokens, loaded_tokens: where the device's own hit ended, and where the load behind it ended.
        confirmed_tokens: tokens computed for certain in this incarnation.
        offered: per group, the first position not offered yet.
        unsettled: positions (group, position) offered without an outcome that may be offered again.
        held: slots that it stored or hit, in the order of use; kept from eviction while it counts on them.
        shares: it used blocks that another put on the host; they are not in `held`.
        is_stuck: a copy of its was given up and may never end.
        load_failed: a load of its failed, so its lookups answer 0 from now on.
        stores: False where its blocks were computed, wholly or in part, before the last reset.
        restored: keys stored again after an eviction, once each.
        jobs: open jobs that concern it.
        least_tokens: shorter hits are recomputed; its first lookup decides for all, 0 before it.
    """

    request: RequestId
    prompt_tokens: int
    keys: tuple[list[BlockKey], ...]
    reads_cache: bool
    state: RequestState = RequestState.SEEN
    incarnation: int = 0
    found_tokens: int = 0
    loaded_tokens: int = 0
    confirmed_tokens: int = 0
    offered: list[int] = field(default_factory=list)
    unsettled: set[tuple[GroupId, int]] = field(default_factory=set)
    held: list[SlotId] = field(default_factory=list)
    shares: bool = False
    is_stuck: bool = False
    load_failed: bool = False
    stores: bool = True
    restored: set[BlockKey] = field(default_factory=set)
    jobs: int = 0
    least_tokens: int = 0

    @property
    def is_live(self) -> bool:
        return self.state not in (RequestState.FINISHING, RequestState.GONE)

    @property
    def has_table(self) -> bool:
        return self.state in _HAVE_TABLE

    def extend_keys(self, new_keys: Sequence[Sequence[BlockKey]]) -> None:
        """Keys of blocks that became whole."""
        for keys, more in zip(self.keys, new_keys, strict=False):
            keys.extend(more)


class Requests:
    """All records, live ones by name. The only one that moves them through their machine."""

    def __init__(self) -> None:
        self._live: dict[RequestId, RequestRecord] = {}
        self._finishing: set[RequestRecord] = set()

    def __bool__(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    def live(self, request: RequestId) -> RequestRecord | None:
        """Return a request that has not ended, None for an unknown one."""
        return self._live.get(request)

    def all_live(self) -> tuple[RequestRecord, ...]:
        """Return all requests that have not ended. Reads only."""
        return tuple(self._live.values())

    def finishing(self) -> frozenset[RequestRecord]:
        """Return the requests that ended with jobs open. Reads only."""
        return frozenset(self._finishing)

    def incarnation(self, request: RequestId, incarnation: int) -> RequestRecord | None:
        """Return a live request if it still has the block table of that incarnation."""
        record = self._live.get(request)
        return record if record is not None and record.incarnation == incarnation else None

    def seen(self, record: RequestRecord) -> None:
        """The engine took a request in."""
        assert record.request not in self._live, record.request
        self._live[record.request] = record

    def move(self, record: RequestRecord, event: RequestEvent) -> None:
        """Apply an event to a request."""
        record.state = next_request_state(record.state, event)
        if event is _END:
            del self._live[record.request]
            self._finishing.add(record)
            self._leave_if_drained(record)

    def job_opened(self, record: RequestRecord) -> None:
        """A job concerns this request."""
        record.jobs += 1

    def job_ended(self, record: RequestRecord) -> None:
        """The last copy of a job that concerns this request has ended."""
        record.jobs -= 1
        if record.state is _FINISHING:
            self._leave_if_drained(record)

    def _leave_if_drained(self, record: RequestRecord) -> None:
        if record.jobs == 0:
            self.move(record, RequestEvent.LAST_JOB)
            self._finishing.discard(record)
