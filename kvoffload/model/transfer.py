"""What crosses from the scheduler's process to a worker's and back: small, picklable, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, SlotId


class Direction(Enum):
    """Which way a job copies."""

    STORE = "store"  # device to host
    LOAD = "load"  # host to device
    CHECK = "check"  # neither: what lies on the host is read, before a load of it is promised

    __hash__ = object.__hash__  # as that of a cause


COPY_DIRECTIONS = (Direction.STORE, Direction.LOAD)
"""Those in which bytes move."""


class Tier(Enum):
    """Where an endpoint of a job lies. Metrics label it."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One job: block `blocks[i]` and slot `slots[i]` hold the same bytes once every rank has ended it well.

    Every rank copies its own shard of every block. `slots` and `blocks` have the same length, at least 1; a check has
    no blocks.
    """

    job: JobId
    direction: Direction
    slots: tuple[SlotId, ...]
    blocks: tuple[DeviceBlockId, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the workers must copy or check, decided in one step. Loads are submitted before stores."""

    loads: tuple[TransferJob, ...] = ()
    stores: tuple[TransferJob, ...] = ()
    checks: tuple[TransferJob, ...] = ()

    @property
    def jobs(self) -> tuple[TransferJob, ...]:
        return (*self.loads, *self.stores, *self.checks)

    @property
    def is_empty(self) -> bool:
        return not (self.loads or self.stores or self.checks)


NOTHING = TransferPlan()
"""What most steps have."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """How one rank's part of one job ended.

    Args:
        job: which job.
        direction: its direction.
        outcome: how it ended. After it is sent, this rank touches neither the slots nor the blocks of the job.
        copied_bytes: bytes copied by this rank (0 if it failed, and of a check).
        queue_s: seconds from submission to the report in which nothing was copied: the noticing of the end is among them,
            and the reading of checksums.
        copy_s: seconds in which it was copied, or a check was made.
        corrupt: positions in the job whose bytes were found corrupt (empty otherwise).
    """

    job: JobId
    direction: Direction
    outcome: CopyOutcome
    copied_bytes: int
    queue_s: float
    copy_s: float
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one rank has to tell after a step. Hearing one twice changes nothing.

    Args:
        rank: who tells.
        jobs: the jobs that ended on this rank since its last report.
        ready_slots: host slots that this rank can use by now; never shrinks.
        store_share: bytes of stores that this rank lets be in flight now, over the most it ever does; above 0, at most 1.
        is_growing: more slots are being made ready.
    """

    rank: Rank
    jobs: tuple[JobReport, ...]
    ready_slots: int
    store_share: float = 1.0
    is_growing: bool = False
