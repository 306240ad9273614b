"""The messages between the scheduler's process and the workers: small and picklable."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.disk import DiskFile
from kvoffload.model.ids import BlockKey, DeviceBlockId, JobId, Rank, RequestId, SlotId
from kvoffload.model.message import Message


class Direction(Enum):
    """Which way a job copies."""

    STORE = "store"  # device to host
    LOAD = "load"  # host to device

    __hash__ = object.__hash__  # as that of a cause


class Tier(Enum):
    """Where one end of a job's copies lies; a label of the metrics."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    __hash__ = object.__hash__  # as that of a cause


class TransferJob(Message, frozen=True):
    """One job: block `blocks[i]` and slot `slots[i]` hold the same bytes once every rank has copied its part.

    Every rank copies its own shard of every block. `slots` and `blocks` have the same length, at least 1.
    """

    job: JobId
    direction: Direction
    slots: tuple[SlotId, ...]
    blocks: tuple[DeviceBlockId, ...]
    request: RequestId | None = None
    """The request that waits for a load; None for a store."""


class DiskJob(Message, frozen=True):
    """One job between host and disk: slot `slots[i]` and place `places[i]` hold the same bytes once every rank has ended it well.

    A spill is a store of the disk's, a fetch a load. `slots` and `places` have the same length, at least 1.

    Args:
        job: its number.
        direction: which way it copies, as seen from the host: STORE to the disk, LOAD from it.
        slots: host slots.
        places: slots of the ranks' slot files.
        sums: of a fetch: for each place, each rank's checksum of what it must hold.
    """

    job: JobId
    direction: Direction
    slots: tuple[SlotId, ...]
    places: tuple[SlotId, ...]
    sums: tuple[tuple[int, ...], ...] = ()


class RemoteJob(Message, frozen=True):
    """One job between host and a remote store: slot `slots[i]` holds the block `keys[i]` once every rank has ended it well.

    Args:
        job: its number.
        direction: which way it copies, as seen from the host: STORE to the remote store, LOAD from it.
        slots: host slots.
        keys: of the blocks, in the same order.
        namespace: of the blocks in the store.
    """

    job: JobId
    direction: Direction
    slots: tuple[SlotId, ...]
    keys: tuple[BlockKey, ...]
    namespace: str

    @property
    def blocks(self) -> tuple[DeviceBlockId, ...]:
        """It touches no device block."""
        return ()


AnyJob: TypeAlias = TransferJob | DiskJob | RemoteJob


class TransferPlan(Message, frozen=True):
    """The copies decided in one step. Workers submit loads before stores.

    Args:
        loads, stores: between device and host.
        disk: between host and disk.
        withdrawn: fetches of earlier plans whose slots need not be read any more, as far as no read has begun.
        remote: between host and a remote store.
    """

    loads: tuple[TransferJob, ...] = ()
    stores: tuple[TransferJob, ...] = ()
    disk: tuple[DiskJob, ...] = ()
    withdrawn: tuple[JobId, ...] = ()
    remote: tuple[RemoteJob, ...] = ()

    @property
    def jobs(self) -> tuple[AnyJob, ...]:
        return (*self.loads, *self.stores, *self.disk, *self.remote)

    @property
    def is_empty(self) -> bool:
        return not (self.jobs or self.withdrawn)


NOTHING = TransferPlan()
"""The plan of most steps."""


class JobReport(Message, frozen=True):
    """How one rank's part of one job ended.

    Args:
        job: the job.
        direction: its direction.
        outcome: how it ended. Once it is sent, this rank no longer touches the job's slots and blocks, but for those in `stuck`.
        copied_bytes: bytes copied by this rank (0 if it failed).
        queue_s: seconds between submission and report in which nothing was copied, including the detection of the end
            and the checksums.
        copy_s: seconds spent copying.
        corrupt: positions in the job whose bytes were found corrupt (empty otherwise).
        sums: of a spill that ended well: a checksum of this rank's shard of each block.
        stuck: positions of a spill whose place may still change, or of a fetch from the disk whose host slot may, because a call
            to the disk has not returned.
        missing: positions of a fetch from a remote store, or of a spill to it, of which the store has no value. The other
            positions of a job that ended well are done.
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


class TransferReport(Message, frozen=True):
    """What one rank reports after a step. A duplicate report changes nothing.

    Args:
        rank: the reporting rank.
        jobs: the jobs that ended on this rank since its last report.
        ready_slots: host slots that this rank has ready; never decreases.
        store_share: the rank's current limit on bytes of stores in flight, as a share of its highest limit; in (0, 1].
        is_growing: the rank is still preparing slots.
        slot_bytes: bytes of one host slot on this rank.
        wanted_slots: host slots that this rank will have once all are ready.
        lost: why the rank's device executes nothing more for this process, None while it works.
        disk_works: this rank's slot file did not fail to open, no call on it hangs, and not too many have failed.
        disk_file: this rank's slot file, once it is open.
        remote_works: this rank reaches the remote store, and its calls there are answered.
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
