"""The messages that vLLM carries between the scheduler's process and the workers'. Both can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvoffload.model.wire import NOTHING, TransferPlan, TransferReport
from kvoffload.runtime.copies import LoadAnswers

if TYPE_CHECKING:
    from kvoffload.disk.identity import KVIdentity


@dataclass(slots=True)
class KVOffloadMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A step's plan.

    Args:
        plan: what to copy.
        ended: loads that the workers must report although they did not copy them to the end.
        disk: names the folder on the disk; sent once.
    """

    plan: TransferPlan = NOTHING
    ended: tuple[LoadAnswers, ...] = ()
    disk: KVIdentity | None = None


NO_PLAN = KVOffloadMetadata()
"""The plan of a step in which nothing is copied."""


class KVOffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What the workers report after a step.

    Args:
        reports: one for each rank that has something to report.
    """

    def __init__(self, reports: tuple[TransferReport, ...]) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both workers' reports. One that arrives twice changes nothing."""
        assert isinstance(other, KVOffloadWorkerMetadata), other
        return KVOffloadWorkerMetadata(self.reports + other.reports)
