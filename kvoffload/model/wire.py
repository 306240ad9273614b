"""Picklable messages between the scheduler's process and the workers, and records of the disk's index."""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvoffload.model.causes import CopyOutcome, MissCause
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, Rank, RequestId, SlotId
from kvoffload.model.message import Message


class Direction(Enum):
    """The direction in which a job copies."""

    STORE = "store"  # away from the device
    LOAD = "load"  # towards the device

    __hash__ = object.__hash__  # hash by identity, for speed, as in `Cause`


class Tier(Enum):
    """A tier of storage. Jobs copy blocks between two tiers, and the tier is a label of metrics.

    Attributes:
        miss_cause: for a tier below the host, why a block that only this tier has misses on the host; else None.
        has_slots: whether the engine decides which block each of the tier's slots holds. Other engines of the machine
            manage their memory themselves, and so does a remote tier: of these the engine has only hints.
    """

    miss_cause: MissCause | None
    has_slots: bool

    DEVICE = "device"
    HOST = "host"
    # The tiers below the host, in the order in which they are searched.
    NODE = "node", MissCause.ON_NODE, False
    DISK = "disk", MissCause.ON_DISK
    REMOTE = "remote", MissCause.IN_REMOTE, False

    __hash__ = object.__hash__  # hash by identity, for speed, as in `Cause`

    def __new__(cls, label: str, miss_cause: MissCause | None = None, has_slots: bool = True) -> Tier:
        tier = object.__new__(cls)
        tier._value_ = label
        tier.miss_cause = miss_cause
        tier.has_slots = has_slots
        return tier


LOWER_TIERS = tuple(tier for tier in Tier if tier.miss_cause is not None)
"""The tiers below the host, in the order in which they are searched."""
SLOT_TIERS = tuple(tier for tier in LOWER_TIERS if tier.has_slots)
"""Those of them about whose slots the engine decides."""


TargetT = TypeVar("TargetT")
ExtraT = TypeVar("ExtraT")


class CopyJob(Message, Generic[TargetT, ExtraT], frozen=True):
    """A job. After every rank has copied its shards, host slot `slots[i]` and `targets[i]` contain the same block.

    `slots` and `targets` have the same length, at least 1.

        tier     targets                        extra
        HOST     device blocks                  the request that waits for the load; None for a store, and for a load that
                                                other parts follow
        NODE     slots of other engines         nothing
        DISK     slots of the ranks' files      for a fetch, every rank's checksum of each slot; empty for a spill
        REMOTE   the blocks' keys               the blocks' namespace in the remote tier

    Args:
        id: the job's id.
        direction: STORE away from the device, or LOAD towards the device.
        tier: the lower of the two tiers; HOST for copies between device and host.
        slots: the host slots.
        targets: the other end of each copy, as listed in the table.
        extra: further data for the workers, as listed in the table.
    """

    id: JobId
    direction: Direction
    tier: Tier
    slots: tuple[SlotId, ...]
    targets: tuple[TargetT, ...]
    extra: ExtraT


class NodeSlot(NamedTuple):
    """A slot in the host memory of another engine on this machine.

    Args:
        engine: the name of the engine's folder; empty if no engine has the block any more.
        generation: names the engine's table.
        slot: the slot.
        number: the slot's sequence number in the table. While the table has it, the slot holds the same block.
    """

    engine: str = ""
    generation: bytes = b""
    slot: SlotId = SlotId(0)
    number: int = 0


DeviceJob: TypeAlias = CopyJob[DeviceBlockId, RequestId | None]
NodeJob: TypeAlias = CopyJob[NodeSlot, tuple[()]]
DiskJob: TypeAlias = CopyJob[SlotId, tuple[tuple[int, ...], ...]]
RemoteJob: TypeAlias = CopyJob[BlockKey, str]
AnyJob: TypeAlias = CopyJob[Any, Any]


class TransferPlan(Message, frozen=True):
    """The copies that the scheduler planned in one step. Workers submit loads before stores.

    Args:
        loads, stores: jobs between device and host.
        below: jobs between host and lower tiers.
        cancelled: cancelled fetches of earlier plans. Workers skip the reads of these fetches that have not started.
    """

    loads: tuple[DeviceJob, ...] = ()
    stores: tuple[DeviceJob, ...] = ()
    below: tuple[AnyJob, ...] = ()
    cancelled: tuple[JobId, ...] = ()

    @property
    def jobs(self) -> tuple[AnyJob, ...]:
        return (*self.loads, *self.stores, *self.below)


NOTHING = TransferPlan()
"""The empty plan of most steps."""


class JobReport(Message, frozen=True):
    """How one rank's part of one job ended.

    Args:
        job: the job.
        direction: the job's direction.
        outcome: how this rank's part of the job ended. After the report the rank uses the job's slots and blocks no
            more, except at positions in `stuck`.
        copied_bytes: how many bytes the rank copied; 0 if its part of the job failed.
        queue_s: seconds from submission to report, except those spent copying: waiting, checksums, and the delay until
            the end was noticed.
        copy_s: seconds spent copying.
        corrupt: positions in the job whose bytes the rank found corrupt.
        sums: after a successful spill, the checksum of the rank's shard of each block.
        stuck: positions in the job that a hung disk call may still write: file slots for a spill, host slots for a
            fetch.
        missing: positions in the job for which a tier without slots has no value. A successful job has copied all other
            positions.
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


class SlotsFile(Message, frozen=True):
    """A rank's file of slots.

    Args:
        file_id: random bytes in the file that identify it even after it is renamed.
        slots: how many slots the file has. For host memory, how many have the bytes that an earlier process left.
        previous: for host memory, the id under which the earlier process knew the file; empty for a new file.
        seconds: for host memory, how long it took until all of it was ready; 0 until then.
    """

    file_id: bytes
    slots: int
    previous: bytes = b""
    seconds: float = 0.0


class TierStatus(Message, frozen=True):
    """What a rank reports about its calls to one lower tier, each time anew.

    Args:
        tier: the tier.
        works: whether the rank makes calls. False if the rank cannot open the tier, if a call hangs, or if too many
            calls have failed.
        file: the rank's file of slots, if the tier has one and it is open.
        faults: for each `RemoteFault`, in order, how many of the rank's calls have failed or were refused so far; for
            the memory of other engines, for each `NodeLoss`, how many blocks could not be fetched; empty if they are not
            counted.
    """

    tier: Tier
    works: bool
    file: SlotsFile | None = None
    faults: tuple[int, ...] = ()


class TransferReport(Message, frozen=True):
    """One rank's report after a step. A duplicate report changes nothing.

    Args:
        rank: the reporting rank.
        jobs: the jobs that ended on this rank since its last report.
        ready_slots: how many host slots the rank has ready; never decreases.
        store_share: the rank's current limit on store bytes in flight, divided by its highest limit; in (0, 1].
        is_growing: True while the rank prepares host slots.
        slot_bytes: the size of one host slot on the rank, in bytes; 0 if another rank reports the memory that it shares.
        wanted_slots: how many host slots the rank will have when all are ready.
        lost: why the rank's process can no longer use the device; None while the device works.
        below: the status of each lower tier that the rank has opened or failed to open.
    """

    rank: Rank
    jobs: tuple[JobReport, ...]
    ready_slots: int
    store_share: float = 1.0
    is_growing: bool = False
    slot_bytes: int = 0
    wanted_slots: int = 0
    lost: str | None = None
    below: tuple[TierStatus, ...] = ()


# -- the index of the disk tier: which block each slot holds ------------------------------------------------------


class Put(Message, frozen=True):
    """Every rank has written its shard of a block into the same slot of its file.

    Args:
        slot: the number of the slot in each rank's file.
        key: the block's key.
        sums: the checksum of each rank's shard.
    """

    slot: SlotId
    key: BlockKey
    sums: tuple[int, ...]


class Invalidate(Message, frozen=True):
    """The block in a slot of the disk became invalid."""

    slot: SlotId


class Use(Message, frozen=True):
    """The block in a slot of the disk was read, and became the most recently used."""

    slot: SlotId


DiskRecord: TypeAlias = Put | Invalidate | Use
