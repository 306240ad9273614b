"""The host memory of one rank: anonymous, in a file that the next engine finds, or shared with other ranks.

host_path, one rank a copy         the rank's file in the engine's folder
host_path, several ranks a copy    the first rank's file, which it passes to the others
several ranks a copy               a file without a name, which the first rank passes to the others
else                               anonymous memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.disk.system import PAGE
from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError, HostMemoryError
from kvoffload.model.wire import SlotsFile, Tier, TierStatus
from kvoffload.node.file_systems import check_free, free_bytes
from kvoffload.node.folder import HostPlace, make_room
from kvoffload.node.table import table_bytes
from kvoffload.runtime.handover import Offer, ask
from kvoffload.transfer.arena import slots_in_chunk
from kvoffload.transfer.host_file import (
    HostFile,
    RankShape,
    closed_on_error,
    make_host_file,
    open_host_file,
    shared_host_file,
)
from kvoffload.transfer.host_memory import fits, slots_for
from kvoffload.transfer.tier_jobs import TierReport

if TYPE_CHECKING:
    from kvoffload.model.ids import Rank
    from kvoffload.node.folder import Claim
    from kvoffload.transfer.layout import DeviceLayout
    from kvoffload.transfer.sharing import Sharing

_WAIT_S = 60.0  # how long a rank waits for the memory of the rank that it shares with


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank and its engine's other ranks.

    Args:
        rank: the rank.
        count: the number of the engine's ranks.
        local: how many of them, with consecutive numbers, run on this machine.
        sharing: which of them share host memory.
    """

    rank: Rank
    count: int
    local: int
    sharing: Sharing

    @property
    def copies(self) -> int:
        """Return how many copies of a block the engine keeps on the host, all machines together."""
        return self.count // self.sharing.ranks

    @property
    def opens_memory(self) -> bool:
        """Return whether the rank is the first of those that share host memory. A rank alone is the first, too."""
        return self.rank % self.sharing.ranks == 0

    @property
    def checked_copies(self) -> int:
        """Return for how many copies the rank checks that they fit: the machine's first rank checks for all of them.

        Free memory shrinks while ranks allocate theirs.
        """
        return self.local // self.sharing.ranks if self.rank % self.local == 0 else 1


class RankMemory:
    """What a rank has opened for its host memory. Create it with `open_memory`.

    Attributes:
        slots: how many slots to prepare.
        file: the file that has the memory; None for anonymous memory.
        is_found_later: whether the next engine can find the file.
        prepared_s: how long it took until all memory was ready; 0 until then.
    """

    def __init__(self, slots: int, file: HostFile | None = None, offer: Offer | None = None) -> None:
        self.slots = slots
        self.file = file
        self.prepared_s = 0.0
        self.is_found_later = file is not None and file.has_name
        self._offer = offer
        self._reported_s = 0.0  # what the last report had of `prepared_s`
        self._report: TierReport | None = None  # the last one, as it is repeated

    def take_report(self) -> TierReport:
        """Return the report about a file that the next engine finds. It is new once all memory is ready."""
        file, report = self.file, self._report
        assert file is not None
        if report is None or self.prepared_s != self._reported_s:
            file.begin()  # with the first report, the scheduler's side may begin to plan copies
            known = SlotsFile(file.id, file.kept, file.previous, self.prepared_s)
            report = TierReport((), self.prepared_s != self._reported_s, TierStatus(Tier.HOST, True, known))
            self._reported_s = self.prepared_s
            self._report = report._replace(is_new=False)
        return report

    def close(self, *, keeps: bool, may_still_write: bool) -> None:
        """Close the file. Calling it again does nothing.

        Args:
            keeps: whether the next engine may find the file.
            may_still_write: whether copies of this process may still write to the memory.
        """
        if self._offer is not None:
            self._offer.close()
        file, self.file, self.is_found_later = self.file, None, False
        if file is not None:
            if not keeps:
                file.remove()
            file.close(may_still_write=may_still_write)


def open_memory(
    config: OffloadConfig, ranks: Ranks, layout: DeviceLayout, place: HostPlace | None
) -> RankMemory:
    """Return a rank's host memory, none of which is ready yet.

    Args:
        config: the operator's settings.
        ranks: the rank and its engine's other ranks.
        layout: the rank's device layout.
        place: determines the folder of the files; None without `host_path`.

    Raises:
        ConfigError: the memory does not fit, the file cannot be used, or the rank to share with passes none.
    """
    if place is None and ranks.sharing.ranks == 1:
        return RankMemory(_slots(config, ranks, layout))
    claim = None if place is None else place.claim()
    try:
        page = PAGE if place is None else place.page
        shape = RankShape(
            ranks.sharing.first_of(ranks.rank), layout, slots_in_chunk(layout), config.verify, page
        )
        if not ranks.opens_memory:
            return _received(ranks, shape, claim)
        if place is None or claim is None:
            file = make_host_file(shape, _slots(config, ranks, layout))
        else:
            file = open_host_file(
                claim, shape, _slots_in_files(config, ranks, shape, place, claim), place.pages
            )
        with closed_on_error(file.files):
            return RankMemory(file.slots, file, _offer(ranks, file))
    except BaseException:
        if claim is not None:
            claim.close()
        raise


def _slots(config: OffloadConfig, ranks: Ranks, layout: DeviceLayout, kept: int = 0) -> int:
    return slots_for(config.host_bytes // ranks.copies, layout, ranks=ranks.checked_copies, kept=kept)


def _slots_in_files(
    config: OffloadConfig, ranks: Ranks, shape: RankShape, place: HostPlace, claim: Claim
) -> int:
    layout = shape.layout
    slots = config.host_bytes // ranks.copies // layout.slot_bytes
    kept = claim.size(in_pages=place.pages is not None)
    size = ranks.checked_copies * shape.file_bytes(slots) - kept
    # While the scheduler's process writes its table, that of the process before is still there.
    tables = 2 * table_bytes(slots, ranks.count)
    if place.pages is None:
        size += tables
    else:
        check_free(place.root, None, tables - claim.size(in_pages=False))
    # A pool of huge pages is apart from the memory that the system and its cgroups count.
    from_pool = max(size, 0) if place.pages else 0
    if ranks.rank % ranks.local == 0:
        make_room(
            place,
            lambda freed: fits(size - from_pool - freed) and free_bytes(place.memory) >= size - freed,
        )
    slots = _slots(config, ranks, layout, kept + from_pool)
    check_free(place.root, place.pages, size)
    return slots


def _offer(ranks: Ranks, file: HostFile) -> Offer | None:
    others = ranks.sharing.ranks - 1
    return Offer(_name(ranks), file.text, file.files, others) if others else None


def _received(ranks: Ranks, shape: RankShape, claim: Claim | None) -> RankMemory:
    try:
        text, files = ask(_name(ranks), _WAIT_S)
    except HostMemoryError as error:
        problem = (
            f"host_share: rank {ranks.rank} gets no host memory from rank {shape.rank}, with which it shares a copy: {error}. "
            "If the ranks run in containers with networks of their own, set host_share to false"
        )
        raise ConfigError([problem]) from error
    file = shared_host_file(shape, text, files, claim)
    return RankMemory(file.slots, file)


def _name(ranks: Ranks) -> str:
    return f"{ranks.sharing.life} {ranks.sharing.first_of(ranks.rank)}"
