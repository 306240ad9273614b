"""The small worlds to explore. Each world is as small as possible for the behaviour that it covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.model.groups import GroupSpec
from tests.core.disk_world import DiskWorld
from tests.core.remote_world import RemoteWorld, Store, TieredWorld
from tests.core.world import World, full, recurrent, window

LONG, SHORT, OTHER = "abcdefghi", "abcde", "xyzuvwrst"
"""Two texts with a common prefix, and a text without this prefix. A block has four characters."""


@dataclass(frozen=True)
class SmallWorld:
    """One world to explore."""

    groups: tuple[GroupSpec, ...] = (full(),)
    # The requests that may arrive, each once.
    texts: Mapping[str, str] = field(default_factory=lambda: {"a": LONG, "b": LONG})
    faults: str = ""  # which faults may happen, each as often as it is named here
    served: tuple[str, ...] = ()  # texts that were stored before and are no longer on the device
    # As in `World`. With the fault "grow", only one slot is ready at first.
    ranks: int = 1
    device: int = 6
    host: int = 2
    policy: str = "eager"
    report_every: int = 1
    disk: int = 0  # as in `DiskWorld`; 0 for no disk
    # Texts that an earlier process left on the disk. With "open", the exploration also reads the index.
    on_disk: tuple[str, ...] = ()
    hints: int = 0  # as in `RemoteWorld`; 0 for no store
    in_store: tuple[str, ...] = ()  # texts that another engine has written to the remote tier
    # How often lookups must find a block before it is written to the disk or the remote tier.
    after_hits: int = 1
    keeps: bool = False  # whether host memory outlives the engine

    @property
    def often(self) -> Counter[str]:
        return Counter(self.faults.split())

    def build(self) -> World:
        world = self._after(self._first_life(), self._other_engine())
        for number, text in enumerate(self.served):
            world.serve(f"before {number}", text)
        world.device.forget_keys()
        return world

    def restarted(self, before: World, *, loses_tail: bool) -> World:
        """Return the world after a kill. The next engine has begun to read the index."""
        disk, store = None, None
        if isinstance(before, DiskWorld):
            before.die(loses_tail=loses_tail)
            disk = before
        elif self.keeps:
            before.die()
        if isinstance(before, RemoteWorld):
            store = before.store
        world = self._after(disk, store, resets=before.resets, is_known=False, kept=before)
        world.resets = before.resets
        return world

    def _first_life(self) -> DiskWorld | None:
        if not self.on_disk:
            return None
        settings = {**self._settings, "device": 32, "host": 32, "ranks": self.ranks}
        world = DiskWorld(*self.groups, disk=self.disk, min_hits=0, **settings)
        for number, text in enumerate(self.on_disk):
            world.serve_again(f"first {number}", text)
        return world

    def _other_engine(self) -> Store | None:
        if not self.in_store:
            return None
        settings = {**self._settings, "device": 32, "host": 32}
        world = RemoteWorld(*self.groups, min_hits=0, **settings)
        for text in self.in_store:
            world.share(text)
        return world.store

    def _after(
        self,
        disk: DiskWorld | None,
        store: Store | None,
        *,
        resets: int = 0,
        is_known: bool = True,
        kept: World | None = None,
    ) -> World:
        settings = self._settings
        if self.keeps:
            settings |= {"keeps": True, "kept": kept}
        if self.disk:
            opens = is_known and "open" not in self.often
            settings |= {"disk": self.disk, "min_hits": self.after_hits, "before": disk, "opens": opens}
        if self.hints:
            settings |= {"hints": self.hints, "min_hits": self.after_hits, "store": store}
            settings |= {"namespace": f"print/{resets}", "is_reached": is_known}
        kinds = (World, DiskWorld), (RemoteWorld, TieredWorld)
        return kinds[self.hints > 0][self.disk > 0](*self.groups, **settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "device": self.device,
            "host": 1 if "grow" in self.often else self.host,
            "policy": self.policy,
            "report_every": self.report_every,
            # Reports can be late only if each step computes one token.
            "step_tokens": 4 if self.report_every == 1 else 1,
        }


_BOTH = (full(), window(5, group=1))
_WINDOW = (window(5),)
_STATES = (recurrent(), full(group=1))
_ONE = {"a": LONG}

WORLDS: Mapping[str, SmallWorld] = {
    # stores into a host that is empty at the start
    "one request": SmallWorld(texts=_ONE, faults="fail late reset preempt grow"),
    "two requests": SmallWorld(faults="fail"),
    "churn": SmallWorld(texts={"a": LONG, "b": OTHER}, faults="preempt", host=1),
    "two ranks": SmallWorld(texts=_ONE, faults="fail fail late reset", ranks=2),
    "a name used again": SmallWorld(faults="again fail late preempt", device=8, host=3),
    "window": SmallWorld(_WINDOW, {"a": "abcdefghijklmnopq"}, "preempt fail reset", device=4),
    "window churn": SmallWorld(_WINDOW, {"a": LONG, "b": OTHER}, device=6),
    "lazy": SmallWorld(texts={"a": LONG, "b": OTHER}, policy="lazy", faults="fail", device=18, host=3),
    "twice": SmallWorld(policy="twice", faults="fail preempt", host=1),
    "policies": SmallWorld(texts=_ONE, policy="auto", faults="choose choose fail preempt", device=18, host=1),
    "late reports": SmallWorld(report_every=2, faults="preempt", device=16),
    "states": SmallWorld(_STATES, _ONE, "fail late reset preempt grow", device=10, host=4),
    "states of two": SmallWorld(_STATES, faults="preempt fail", device=14, host=3),
    # loads, and requests that wait for loads; at the start, the prefix is on the host
    "a load": SmallWorld(texts=_ONE, served=(LONG,), faults="fail late reset preempt corrupt"),
    "a load on two ranks": SmallWorld(texts=_ONE, served=(LONG,), faults="fail late reset corrupt", ranks=2),
    "sharing a load": SmallWorld(served=(LONG,), faults="fail late"),
    "three share a load": SmallWorld(texts={"a": LONG, "b": LONG, "c": SHORT}, served=(LONG,), device=9),
    "reset under a load": SmallWorld(served=(LONG,), faults="reset"),
    "loads and evictions": SmallWorld(
        texts={"a": LONG, "b": OTHER, "c": SHORT}, served=(LONG,), device=9, host=3
    ),
    "too little room for two loads": SmallWorld(
        texts={"a": LONG, "b": OTHER}, served=(LONG, OTHER), faults="fail preempt", device=5, host=4
    ),
    "a window's load": SmallWorld(_WINDOW, served=(LONG,), faults="fail preempt", device=7),
    "full and window": SmallWorld(_BOTH, served=(LONG,), faults="fail reset", device=14, host=4),
    "a state's load": SmallWorld(_STATES, _ONE, "fail reset preempt corrupt", (LONG,), device=10, host=4),
    "sharing a state's load": SmallWorld(_STATES, served=(LONG,), faults="fail", device=14, host=4),
    "lazy load": SmallWorld(policy="lazy", served=(LONG,), faults="reset corrupt", device=18),
    # spills, fetches, and restarts in a new process; with 8 host slots, a fetch may copy 2 blocks
    "spills": SmallWorld(texts=_ONE, faults="fail late reset hang corrupt", host=3, disk=2, after_hits=0),
    "spills on two ranks": SmallWorld(
        texts=_ONE, faults="fail late hang corrupt", ranks=2, host=2, disk=2, after_hits=0
    ),
    "a spill over another": SmallWorld(
        texts={"a": SHORT, "b": OTHER}, faults="restart spoil", device=8, disk=1, after_hits=0
    ),
    "spills of what was found again": SmallWorld(served=(LONG,), faults="fail reset restart", host=3, disk=2),
    "a fetch": SmallWorld(
        texts=_ONE, on_disk=(LONG,), faults="fail late reset corrupt hang restart", host=8, disk=3
    ),
    "a fetch on two ranks": SmallWorld(
        texts=_ONE, on_disk=(LONG,), faults="fail late spoil corrupt", ranks=2, host=8, disk=2
    ),
    "sharing a fetch": SmallWorld(on_disk=(LONG,), faults="fail late spoil", host=8, disk=2),
    "fetches and evictions": SmallWorld(
        texts={"a": LONG, "b": OTHER}, on_disk=(LONG,), faults="spoil", device=8, host=2, disk=3
    ),
    "fetches in rounds": SmallWorld(
        texts={"a": LONG, "b": SHORT}, on_disk=(LONG,), faults="fail late reset preempt", host=4, disk=2
    ),
    # loads in parts, because the prefix is longer than the host, which has the head at the start
    "a load in parts": SmallWorld(
        texts=_ONE, on_disk=(LONG,), served=(SHORT,), faults="fail late reset corrupt hang", host=1, disk=2
    ),
    "a load in parts on two ranks": SmallWorld(
        texts=_ONE, on_disk=(LONG,), served=(SHORT,), faults="fail late spoil", ranks=2, host=1, disk=2
    ),
    "sharing a load in parts": SmallWorld(
        on_disk=(LONG,), served=(SHORT,), faults="fail degrade", device=8, host=1, disk=2
    ),
    "a load in parts from the store": SmallWorld(
        texts=_ONE,
        in_store=(LONG,),
        served=(SHORT,),
        faults="late reset evict mute lose restart",
        host=1,
        hints=3,
    ),
    "a window's fetch": SmallWorld(
        _WINDOW, _ONE, "fail reset restart", device=7, host=8, disk=2, on_disk=(LONG,)
    ),
    "a state's fetch": SmallWorld(
        _STATES, _ONE, "fail corrupt preempt", device=10, host=12, disk=4, on_disk=(LONG,)
    ),
    "a disk that opens": SmallWorld(
        texts=_ONE, on_disk=(LONG,), faults="open reset close restart degrade", host=8, disk=3, after_hits=0
    ),
    # A remote tier shared by several engines. The core queries the remote tier when a request arrives, and
    # the answer may be wrong or late.
    "puts": SmallWorld(texts=_ONE, faults="fail late reset full corrupt", host=3, hints=3, after_hits=0),
    "puts on two ranks": SmallWorld(
        texts=_ONE, faults="fail full lose", ranks=2, host=3, hints=2, after_hits=0
    ),
    "puts beside another writer": SmallWorld(
        texts={"a": SHORT, "b": OTHER},
        faults="overwrite mute",
        device=8,
        host=4,
        hints=1,
        in_store=(LONG, OTHER),
        after_hits=0,
    ),
    "a fetch from the store": SmallWorld(
        texts=_ONE, faults="fail late reset corrupt evict mute", host=8, hints=3, in_store=(LONG,)
    ),
    "a fetch from the store on two ranks": SmallWorld(
        texts=_ONE, faults="fail late evict overwrite", ranks=2, host=8, hints=3, in_store=(LONG,)
    ),
    "sharing a fetch from the store": SmallWorld(faults="lie fail evict", host=8, hints=3, in_store=(LONG,)),
    "a store that is lost": SmallWorld(
        texts=_ONE,
        faults="lose lose empty rename restart reset",
        host=8,
        hints=3,
        in_store=(LONG,),
        after_hits=0,
    ),
    "a window's fetch from the store": SmallWorld(
        _WINDOW, _ONE, "lie evict reset", device=7, host=8, hints=4, in_store=(LONG,)
    ),
    "a state's fetch from the store": SmallWorld(
        _STATES, _ONE, "fail evict preempt", device=10, host=12, hints=5, in_store=(LONG,)
    ),
    "disk and store": SmallWorld(
        texts=_ONE,
        on_disk=(SHORT,),
        in_store=(LONG,),
        faults="fail late corrupt evict spoil reset restart",
        host=12,
        disk=2,
        hints=3,
    ),
    "spills to both": SmallWorld(
        texts=_ONE, faults="fail lose reset hang", host=3, disk=2, hints=2, after_hits=0
    ),
    # Host memory that outlives the engine, which is killed. Its copies may write for a moment longer.
    "stores that are found again": SmallWorld(
        texts=_ONE, faults="restart fail late reset preempt", keeps=True
    ),
    "stores on two ranks, found again": SmallWorld(
        texts=_ONE, faults="restart restart fail", ranks=2, keeps=True
    ),
    "churn of what is found again": SmallWorld(
        texts={"a": LONG, "b": OTHER}, faults="restart", device=8, keeps=True
    ),
    "a load of what is found again": SmallWorld(
        texts=_ONE, served=(LONG,), faults="restart corrupt reset fail", keeps=True
    ),
    "fetches that are found again": SmallWorld(
        texts=_ONE, on_disk=(LONG,), faults="restart fail late hang", host=8, disk=3, keeps=True
    ),
    # In these worlds, the engine or the operator breaks the contract.
    "switched off": SmallWorld(served=(LONG,), faults="degrade fail", ranks=2),
    "violations": SmallWorld(served=(LONG,), faults="violation preempt forget"),
}
