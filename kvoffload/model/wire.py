"""Small, picklable messages between the scheduler's process and the workers, and records of the disk's index."""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, Rank, RequestId, SlotId
from kvoffload.model.message import Message


class Direction(Enum):
    """The direction in which a job copies."""

    STORE = "store"  # away from the device
    LOAD = "load"  # towards the device

    __hash__ = object.__hash__  # hash by identity, for speed, as in `Cause`


class Tier(Enum):
    """Where blocks are stored: one end of a job's copies, and a label of metrics."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    __hash__ = object.__hash__  # hash by identity, for speed, as in `Cause`


TargetT = TypeVar("TargetT")
ExtraT = TypeVar("ExtraT")


class CopyJob(Message, Generic[TargetT, ExtraT], frozen=True):
    """One job. After every rank has succeeded, host slot `slots[i]` and `targets[i]` contain the same block.

    Every rank copies its own shard of every block. `slots` and `targets` have the same length, at least 1.

        tier     targets                        extra
        HOST     device blocks                  the request that waits for the load; None for a store
        DISK     slots of the ranks' files      for a fetch, every rank's checksum of each slot; empty for a spill
        REMOTE   the blocks' keys               the blocks' namespace in the remote tier

    Args:
        id: the job's id.
        direction: STORE away from the device, LOAD towards it.
        tier: the lower end of the job's copies; HOST for copies between device and host.
        slots: host slots.
        targets: the other ends of the copies.
        extra: further data for the workers; see the table.
    """

    id: JobId
    direction: Direction
    tier: Tier
    slots: tuple[SlotId, ...]
    targets: tuple[TargetT, ...]
    extra: ExtraT


DeviceJob: TypeAlias = CopyJob[DeviceBlockId, RequestId | None]
DiskJob: TypeAlias = CopyJob[SlotId, tuple[tuple[int, ...], ...]]
RemoteJob: TypeAlias = CopyJob[BlockKey, str]
AnyJob: TypeAlias = CopyJob[Any, Any]


class TransferPlan(Message, frozen=True):
    """The copies decided in one step. Workers submit loads before stores.

    Args:
        loads, stores: jobs between device and host.
        disk: jobs between host and disk.
        cancelled: fetches from earlier plans; workers skip any of their reads that have not started.
        remote: jobs between host and remote tier.
    """

    loads: tuple[DeviceJob, ...] = ()
    stores: tuple[DeviceJob, ...] = ()
    disk: tuple[DiskJob, ...] = ()
    cancelled: tuple[JobId, ...] = ()
    remote: tuple[RemoteJob, ...] = ()

    @property
    def jobs(self) -> tuple[AnyJob, ...]:
        return (*self.loads, *self.stores, *self.disk, *self.remote)


NOTHING = TransferPlan()
"""The empty plan of most steps."""


class JobReport(Message, frozen=True):
    """How one rank's part of one job ended.

    Args:
        job: the job.
        direction: the job's direction.
        outcome: how this rank's part of the job ended. After this report the rank touches none of the job's slots and
            blocks, except those in `stuck`.
        copied_bytes: bytes that this rank copied; 0 if its part of the job failed.
        queue_s: seconds between submission and report in which nothing was copied, including the time for checksums and
            the delay until the end was noticed.
        copy_s: seconds spent copying.
        corrupt: positions in the job whose bytes were found corrupt.
        sums: after a successful spill, a checksum of this rank's shard of each block.
        stuck: positions that a hung disk call may still write: file slots for a spill, host slots for a fetch.
        missing: positions for which the remote tier has no value after a fetch or a spill. A successful job has copied
            all other positions.
    """

    job: JobId
    direction: Direction
    outcome: CopyOutcome
    copied_bytes: int
    queue_s: float
    copy_s: float
    corrupt: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class DiskFile(Message, frozen=True):
    """A rank's slot file.

    Args:
        file_id: random bytes that identify the file even if it is renamed.
        slots: how many slots the file has.
    """

    file_id: bytes
    slots: int


class TransferReport(Message, frozen=True):
    """What one rank reports after a step. A duplicate report changes nothing.

    Args:
        rank: the reporting rank.
        jobs: the jobs that ended on this rank since its last report.
        ready_slots: how many host slots this rank has ready; never decreases.
        store_share: the rank's current limit on store bytes in flight, as a share of its highest limit; in (0, 1].
        is_growing: whether the rank is still preparing slots.
        slot_bytes: bytes of one host slot on this rank.
        wanted_slots: how many host slots this rank will have once all are ready.
        lost: why this rank's process can no longer use the device; None while it can.
        disk_works: False if this rank's slot file cannot be opened, a call on it hangs, or too many calls have failed.
        disk_file: this rank's slot file, once it is open.
        remote_works: whether the remote tier answers this rank's calls.
        remote_faults: failed calls and refused writes of this rank so far, in the order of `RemoteFault`.
    """

    rank: Rank
    jobs: tuple[JobReport, ...]
    ready_slots: int
    store_share: float = 1.0
    is_growing: bool = False
    slot_bytes: int = 0
    wanted_slots: int = 0
    lost: str | None = None
    disk_works: bool = True
    disk_file: DiskFile | None = None
    remote_works: bool = False
    remote_faults: tuple[int, ...] = ()


# -- the index of the disk tier: which block each slot holds ------------------------------------------------------


class Put(Message, frozen=True):
    """Every rank has written a block into this slot of its file.

    Args:
        slot: the slot's number.
        key: the block's key.
        sums: a checksum of each rank's shard.
    """

    slot: SlotId
    key: BlockKey
    sums: tuple[int, ...]


class Invalidate(Message, frozen=True):
    """A slot's block became invalid."""

    slot: SlotId


class Use(Message, frozen=True):
    """A slot's block was read and is now the most recently used."""

    slot: SlotId


DiskRecord: TypeAlias = Put | Invalidate | Use
