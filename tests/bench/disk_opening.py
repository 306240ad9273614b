"""Measures how long a starting engine takes to open a disk's index, and the core's longest step during that time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvoffload.cli.exits import CommandError
from kvoffload.core.offload_core import OffloadCore
from kvoffload.core.state import Policy
from kvoffload.core.tiers import DiskTier
from kvoffload.disk.folder import DiskPlace, make_folder
from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.index import Entries, IndexHeader, new_generation, record_type, start_index
from kvoffload.model.engine import EngineShape
from kvoffload.model.facts import TierRestored
from kvoffload.model.groups import AttentionKind, GroupSpec
from kvoffload.model.ids import GroupId, Rank
from kvoffload.model.wire import SlotsFile, TransferReport
from kvoffload.runtime.disk_catalog import DiskCatalog
from kvoffload.runtime.portal import Portal
from tests.bench.engineless import CountedBlocks
from tests.bench.lines import Line, line
from tests.core.below import disk_of, statuses

_RANKS, _KEY_BYTES = 2, 33  # the length of a group number and a SHA-256 hash
_TIMEOUT_S = 600
_GOAL_S, _GOAL_STEP_MS = 5.0, 10.0


def opening(folder: Path, blocks: int, repeats: int) -> Iterator[Line]:
    """Write an index of `blocks` blocks, and measure the time to open the index, `repeats` times.

    During the measurement, the garbage collector ignores all older objects, as it does in vLLM after the start.

    Raises:
        CommandError: the index cannot be opened.
    """
    identity = _write(folder, blocks)
    seconds, cpu, longest, core = list[float](), list[float](), list[float](), list[float]()
    gc.collect()
    gc.freeze()
    try:
        for _ in range(repeats):
            began = time.process_time()
            took, steps = _open(folder, identity, blocks)
            seconds.append(took)
            cpu.append(time.process_time() - began)
            longest.append(1e3 * max(steps))
            core.append(sum(steps))
    finally:
        gc.unfreeze()
    what = f"opening an index of {blocks:,} blocks, {_RANKS} ranks"
    yield line(what, seconds, " s", at_most=_GOAL_S)
    yield line(f"{what}: processor time", cpu, " s")
    yield line(f"{what}: longest step of the core, processor time", longest, " ms", at_most=_GOAL_STEP_MS)
    yield line(f"{what}: all steps of the core, processor time", core, " s")


def _write(folder: Path, blocks: int) -> KVIdentity:
    identity = KVIdentity("bench", "bench", "bench", {})
    random = np.random.default_rng(0)
    keys = random.bytes(blocks * _KEY_BYTES)
    puts = np.empty(blocks, record_type(_RANKS))
    puts["slot"] = random.permutation(blocks)
    puts["kind"] = 1  # a put record
    puts["key_bytes"] = _KEY_BYTES
    puts["key"] = np.frombuffer(keys, f"V{_KEY_BYTES}")
    puts["sums"] = random.integers(0, 2**63, (blocks, _RANKS), np.uint64)
    header = IndexHeader(new_generation(), tuple(map(_file_id, range(_RANKS))), blocks, identity.fingerprint)
    with make_folder(folder, identity, 0) as opened:
        start_index(opened, header, Entries(puts)).close()
    return identity


def _open(folder: Path, identity: KVIdentity, blocks: int) -> tuple[float, list[float]]:
    """Open the index. Return the seconds until the core has all blocks, and the seconds of each core step."""
    group = GroupSpec(GroupId(0), AttentionKind.FULL, 16)
    shape = EngineShape((group,), ranks=_RANKS, device_blocks=64, step_tokens=64)
    core = OffloadCore(shape, Policy(tiers=((DiskTier, 1),)), CountedBlocks(64))
    portal = Portal("kvoffload-bench")
    index = DiskCatalog(
        DiskPlace(folder, lambda: identity), _RANKS, portal, asyncio.sleep, closes_in_s=_TIMEOUT_S
    )
    files = [SlotsFile(_file_id(rank), blocks) for rank in range(_RANKS)]
    try:
        began = time.perf_counter()
        index.ranks_reported(
            [TransferReport(Rank(rank), (), 0, below=statuses(file)) for rank, file in enumerate(files)]
        )
        steps = list(_steps(core, index))
        took = time.perf_counter() - began
    finally:
        index.close()
        portal.close()
    if len(disk_of(core.state).pool.index) != blocks:
        raise CommandError(f"the index of {blocks} blocks in {folder} was not opened")
    return took, steps


def _steps(core: OffloadCore, index: DiskCatalog) -> Iterator[float]:
    """Pass the index to the core in steps. Yield each step's processor time, which excludes other load."""
    while index.is_restoring:
        if not index.arrived:
            time.sleep(1e-3)
            continue
        (fact,) = index.take_facts()
        began = time.thread_time()
        if isinstance(fact, TierRestored):
            core.tier_store.restored(fact)
            yield time.thread_time() - began


def _file_id(rank: int) -> bytes:
    return bytes([rank]) * 16
