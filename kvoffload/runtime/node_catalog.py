"""The memory of other engines on this machine, on the scheduler's side: which blocks they have, and where.

    our own table has its fingerprint ─▶ once a second: look for engines of our kind with equal KV that have not been reset
        neighbours ─▶ 20 times a second: read which of their slots have changed
    a request arrives ─▶ the core looks for its keys in dicts ─▶ a fetch names the slots ─▶ `kvoffload.transfer.node`
    reset of any engine of our kind ─▶ no neighbours until this process ends

The catalog's thread reads tables. Hooks only look up keys, and never wait. What they find may be overwritten before it is
copied, which the ranks notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from kvoffload.disk.open_folder import OpenFolder, open_folder
from kvoffload.logs import get_logger
from kvoffload.model import facts
from kvoffload.model.causes import RemoteFault
from kvoffload.model.errors import DiskError, reason_of
from kvoffload.model.ids import BlockKey
from kvoffload.model.wire import NodeSlot, Tier, TransferReport
from kvoffload.node.neighbour import Neighbour, TableFile, find_neighbours
from kvoffload.node.resets import last_reset
from kvoffload.node.table import TableHeader
from kvoffload.runtime.host_catalog import HostCatalog
from kvoffload.runtime.portal import Portal
from kvoffload.transfer.node import read_shapes

SCAN_S = 1.0  # the time between two looks for engines that have started
FOLLOW_S = 0.05
"""The time between two looks at what neighbours have changed. Until then, blocks that they have stored are not found."""

log = get_logger("node")


class NodeCatalog:
    """The scheduler's part of the memory of other engines on this machine.

    Args:
        host: the catalog of this engine's own memory.
        portal: provides a thread that reads tables.
        monotonic: returns the time in seconds.
        sleep: a coroutine function that waits for a number of seconds.
        sharers: how many ranks share one copy of each block.

    Attributes:
        arrived: facts for the core.
        neighbours: the other engines by the names of their folders. The catalog's thread replaces the dict.
    """

    def __init__(
        self,
        host: HostCatalog,
        portal: Portal,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        sharers: int = 1,
    ) -> None:
        self._host = host
        self._sharers = sharers
        self._monotonic = monotonic
        self._sleep = sleep
        self._executor = portal.new_executor("node-catalog")
        self.arrived: list[facts.Fact] = [facts.TierOpened(Tier.NODE, "node")]
        self.awaits_ranks = self.is_restoring = False
        self.faults: Mapping[RemoteFault, int] = {}
        self.opening: str | None = None
        self.poll_s = inf
        self.neighbours: Mapping[str, Neighbour] = {}
        self._kind: OpenFolder | None = None
        self._is_over = False  # True after a reset
        self._scans_at = -inf
        self._failure = ""  # why the last look failed
        self._looking = portal.spawn(self._look_now_and_then)

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def take_facts(self) -> list[facts.Fact]:
        taken = self.arrived.copy()
        self.arrived.clear()  # in place: hooks look at the list
        return taken

    @property
    def is_empty(self) -> bool:
        return self._is_over or not self.neighbours

    def find(self, keys: Sequence[BlockKey], /) -> list[BlockKey]:
        """Return those of the keys whose blocks a neighbour has."""
        parts = [neighbour.parts for neighbour in self.neighbours.values()]
        return [key for key in keys if any(key in part[key[0]] for part in parts)]

    def places(self, keys: Sequence[BlockKey], /) -> list[NodeSlot]:
        """Return where each block is now; an empty `NodeSlot` for a block that no neighbour has any more."""
        neighbours = () if self._is_over else self.neighbours.items()
        return [self._place(key, neighbours) for key in keys]

    def _place(self, key: BlockKey, neighbours: Iterable[tuple[str, Neighbour]]) -> NodeSlot:
        for name, neighbour in neighbours:
            if (found := neighbour.parts[key[0]].get(key)) is not None:
                return NodeSlot(name, neighbour.table.header.generation, *found)
        return NodeSlot()

    def ranks_reported(self, _: Iterable[TransferReport]) -> None:
        """Do nothing: each rank opens the files that it reads."""

    def send(self, _: Sequence[object]) -> None:
        """Do nothing: the core looks up keys itself, and writes nothing to this tier."""

    def reset(self) -> bool:
        """Have no neighbours any more: this process may have other weights now than its fingerprint says."""
        self._is_over = True
        return True

    def close(self) -> None:
        """Stop following neighbours."""
        self._looking.cancel()
        self._executor.submit(self._close)
        self._executor.shutdown(wait=False)

    # -- on the catalog's thread --------------------------------------------------------------------------------

    async def _look_now_and_then(self) -> None:
        while True:
            await self._sleep(FOLLOW_S if self.neighbours else SCAN_S)
            # The look may find the first neighbour, which must then be followed at once.
            await asyncio.wrap_future(self._executor.submit(self._look))

    def _look(self) -> None:
        """Read what neighbours have changed. Once a second, look for new ones. If it fails, go on without neighbours."""
        try:
            own = self._host.shared
            if own is None or self._is_over:
                self._keep({})
                return
            self._keep({name: each for name, each in self.neighbours.items() if each.follow()})
            if (now := self._monotonic()) >= self._scans_at:
                self._scans_at = now + SCAN_S
                self._scan(*own)
                self._failure = ""
        except Exception as error:
            if (reason := reason_of(error)) != self._failure:  # else every look would log it
                log.warning("neighbours_not_read", reason=reason)
            self._failure = reason
            self._keep({})

    def _scan(self, path: Path, own: TableHeader) -> None:
        if self._kind is None:
            self._kind = open_folder(path.parent)
        if last_reset(self._kind) != own.reset:
            log.info(
                "neighbours_left", note="an engine was reset; engines that run do not share memory any more"
            )
            self._is_over = True
            self._keep({})
            return
        with open_folder(path) as folder:
            shapes = read_shapes(folder, own, self._sharers)

        def fits(other: OpenFolder, table: TableFile) -> bool:
            theirs = table.header
            is_equal = (theirs.fingerprint, theirs.reset) == (own.fingerprint, own.reset)
            return is_equal and shapes is not None and read_shapes(other, theirs, self._sharers) == shapes

        for name, found in find_neighbours(self._kind, {*self.neighbours, path.name}, fits):
            if found.follow():
                log.info("neighbour_found", engine=name, blocks=len(found))
                self._keep({**self.neighbours, name: found})
            else:
                found.close()

    def _keep(self, neighbours: Mapping[str, Neighbour]) -> None:
        """Replace the neighbours, and close those that are left out."""
        before = self.neighbours
        self.neighbours = {} if self._is_over else neighbours
        # If a reset came meanwhile, new ones are left out, too.
        for name, each in {**before, **neighbours}.items():
            if name not in self.neighbours:
                log.info("neighbour_left", engine=name)
                each.close()

    def _close(self) -> None:
        self._is_over = True
        self._keep({})
        if self._kind is not None:
            with suppress(OSError, DiskError):
                self._kind.close()
