"""The messages that vLLM sends between the scheduler's process and the workers. These messages can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvoffload.model.wire import NOTHING, TransferPlan, TransferReport
from kvoffload.runtime.copies import NO_ANSWERS, LoadAnswers

if TYPE_CHECKING:
    from kvoffload.disk.identity import KVIdentity


@dataclass(slots=True)
class KVOffloadMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the type checker runs without vLLM
    """A step's plan.

    Args:
        plan: the copies of this step.
        answers: loads that ended. The workers report the loads without a finished copy to vLLM.
        disk: the KV identity, which names the folder on the disk; sent once, otherwise None.
    """

    plan: TransferPlan = NOTHING
    answers: LoadAnswers = NO_ANSWERS
    disk: KVIdentity | None = None


NO_PLAN = KVOffloadMetadata()
"""The message for a step in which nothing is copied."""


class KVOffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # the type checker runs without vLLM
    """The workers' reports after a step.

    Args:
        reports: one for each rank that has something to report.
    """

    def __init__(self, reports: tuple[TransferReport, ...]) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return one message with both workers' reports. A duplicate report has no effect."""
        assert isinstance(other, KVOffloadWorkerMetadata), other
        return KVOffloadWorkerMetadata(self.reports + other.reports)
