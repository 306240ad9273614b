"""A rank's side: the engine's hooks, forwarded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvoffload.checks.startup import log_warnings
from kvoffload.model.transfer import TransferPlan
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.transfer.layout import layout_of

if TYPE_CHECKING:
    import torch

    from kvoffload.checks.check import Finding
    from kvoffload.transfer.layout import DeviceLayout


class ReferenceWorker:
    """Offloading on one rank.

    Args:
        offload: the runtime's worker side.
        examine: the doctor's checks, run before any host memory is allocated.
    """

    def __init__(self, offload: WorkerSide, examine: Callable[[DeviceLayout], Sequence[Finding]]) -> None:
        self.offload = offload
        self._examine = examine

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        layout = layout_of(tensors)
        findings = self._examine(layout)
        self.offload.register(layout)
        log_warnings(findings)

    def start_loads(self, plan: object) -> None:
        self.offload.begin_step(_plan(plan))
        self.offload.start_loads(_plan(plan))

    def start_stores(self, plan: object) -> None:
        self.offload.start_stores(_plan(plan))

    def take_output(self) -> object:
        return self.offload.take_report()

    def shutdown(self) -> None:
        self.offload.close()


def _plan(plan: object) -> TransferPlan:
    assert isinstance(plan, TransferPlan), plan
    return plan
