"""A plugin that corrupts one loaded block, to test that the demo notices wrong bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvoffload.engine.plugin import EngineFacts, EnginePlugin, SchedulerPlugin, WorkerPlugin
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import JobId
from kvoffload.model.wire import Direction, TransferPlan, TransferReport

if TYPE_CHECKING:
    import torch

    from kvoffload.runtime.scheduler_side import SchedulerSide


class CorruptingPlugin:
    """Wraps the real plugin, and corrupts the first block that the first rank loads."""

    def __init__(self, inside: EnginePlugin) -> None:
        self._inside = inside

    @property
    def offload(self) -> SchedulerSide | None:
        offload: SchedulerSide | None = getattr(self._inside, "offload", None)
        return offload

    def scheduler_side(self, engine: EngineFacts) -> SchedulerPlugin:
        return self._inside.scheduler_side(engine)

    def worker_side(self, engine: EngineFacts, rank: int) -> WorkerPlugin:
        """Return the wrapped plugin's worker side; on the first rank, one that corrupts a block."""
        worker = self._inside.worker_side(engine, rank)
        return worker if rank else CorruptingWorker(worker)


class CorruptingWorker(WorkerPlugin):
    """Waits for the end of the first load, and changes one block before the load is reported to the engine."""

    def __init__(self, inside: WorkerPlugin) -> None:
        self._inside = inside
        self._tensors: Sequence[torch.Tensor] = ()
        self._target: tuple[JobId, int] | None = None
        self._is_done = False

    def register_kv_caches(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._inside.register_kv_caches(tensors)

    def start_loads(self, plan: object) -> None:
        """Choose the first block of the first load."""
        assert isinstance(plan, TransferPlan), plan
        if plan.loads and self._target is None:
            self._target = (plan.loads[0].id, plan.loads[0].targets[0])
        self._inside.start_loads(plan)

    def start_stores(self, plan: object) -> None:
        self._inside.start_stores(plan)

    def take_output(self) -> object:
        """Change the block after its load has ended."""
        output = self._inside.take_output()
        if self._target is not None and isinstance(output, TransferReport) and not self._is_done:
            job, block = self._target
            arrived = [
                report.job
                for report in output.jobs
                if report.direction is Direction.LOAD and report.outcome is CopyOutcome.DONE
            ]
            if job in arrived:
                self._spoil(block)
        return output

    def shutdown(self) -> None:
        self._inside.shutdown()

    def _spoil(self, block: int) -> None:
        self._is_done = True
        for tensor in self._tensors:
            tensor[block].neg_()
