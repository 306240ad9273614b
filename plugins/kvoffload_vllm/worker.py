"""The connector's hooks on the worker side. They start the plan's copies and report how the copies ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvoffload.checks.startup import log_warnings
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.wire import Direction
from kvoffload_vllm.metadata import KVOffloadMetadata, KVOffloadWorkerMetadata

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

    from kvoffload.checks.check import Finding
    from kvoffload.disk.identity import KVIdentity
    from kvoffload.model.ids import DeviceBlockId, JobId
    from kvoffload.model.wire import TransferReport
    from kvoffload.runtime.worker_side import WorkerSide
    from kvoffload.transfer.layout import DeviceLayout


@dataclass(slots=True)
class Received:
    """The loads that ended on a worker since the last step. Every load is reported exactly once.

    Args:
        finished: the requests whose load ended, including failed loads.
        failed: the requests whose load failed.
        bad_blocks: the device blocks that failed loads should have filled.
    """

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class VllmWorker:
    """The connector hooks that a vLLM worker calls.

    Args:
        offload: the runtime's worker side.
        closed: a function that `close` calls at its end.
        examine: runs the doctor's checks, before the worker allocates host memory.
        identity: the future for which the disk tier waits. It gets the KV identity from the scheduler side; `close`
            cancels it.
    """

    def __init__(
        self,
        offload: WorkerSide,
        closed: Callable[[], object],
        examine: Callable[[DeviceLayout], Sequence[Finding]],
        identity: Future[KVIdentity] | None = None,
    ) -> None:
        self.offload = offload
        self._closed = closed
        self._examine = examine
        self._identity: Future[KVIdentity] = Future() if identity is None else identity
        self._metadata: KVOffloadMetadata | None = None
        self._is_registered = False
        self._stores_started = True
        self._loading: dict[JobId, tuple[str, tuple[DeviceBlockId, ...]]] = {}
        self._received = Received()
        self._report: TransferReport | None = None

    def register(self, layout: DeviceLayout) -> None:
        """Run the doctor's checks on the layout of the worker's KV memory, and start to prepare host memory.

        A second call only changes the addresses.
        """
        if self._is_registered:
            self.offload.restore(layout)
            return
        findings = self._examine(layout)
        self.offload.register(layout)
        self._is_registered = True
        log_warnings(findings)

    def unregister_kv_caches(self) -> None:
        """Wait until no copy uses the KV memory, which vLLM releases next. Only vLLM 0.33 and newer call this method.

        Raises:
            CopyError: a copy hangs; vLLM must not release the memory.
        """
        self.offload.unregister()

    def restore_kv_caches(self) -> None:
        """Copy again: vLLM has mapped the KV memory at the addresses that it had before."""
        self.offload.restore()

    # -- a step -------------------------------------------------------------------------------------------------

    def bind(self, metadata: KVOffloadMetadata) -> None:
        """Begin a step, and record the loads that ended without a copy for the next report to vLLM.

        vLLM's model runners call this method before the forward pass, after they have enqueued the kernels that zero
        and copy blocks for the step.
        """
        self._metadata = metadata
        self._stores_started = False
        self.offload.begin_step(metadata.plan)
        if metadata.disk is not None and not self._identity.done():
            self._identity.set_result(metadata.disk)
        for load in metadata.plan.loads:
            if load.extra is not None:  # no other parts of the same load follow
                self._loading[load.id] = (load.extra, load.targets)
        answers = metadata.answers
        for job in answers.abandoned:
            # A load whose copy has ended is already reported. If the copy still runs, the blocks stay leased, so it is
            # safe to report the load as failed now.
            if job in self._loading:
                self._load_ended(job, failed=True)
        if answers.without_copy:
            self._received.finished.update(answers.without_copy)
            self._received.failed.update({*answers.without_copy} & {*answers.failed})
            self._received.bad_blocks.update(metadata.bad_blocks)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Start the step's loads. The copies wait for the kernels that the worker's thread launched before `bind`."""
        if self._metadata is not None:
            self.offload.start_loads(self._metadata.plan)

    def wait_for_save(self) -> None:
        """Start the step's stores, unless an earlier call in this step has started them.

        vLLM calls this method after the forward pass. Versions before 0.31 do not call it in steps without a forward
        pass.
        """
        if self._metadata is not None and not self._stores_started:
            self._stores_started = True
            self.offload.start_stores(self._metadata.plan)

    def clear(self) -> None:
        """End the step. Start the step's stores if vLLM did not call `wait_for_save`."""
        self.wait_for_save()
        self._metadata = None

    def take_received(self) -> Received:
        """Return the loads that ended since the last call, without waiting."""
        report = self.offload.take_report()
        if report is not None:
            self._keep(report)
            for job in report.jobs:
                if job.direction is Direction.LOAD and job.job in self._loading:
                    self._load_ended(job.job, failed=job.outcome is not CopyOutcome.DONE)
        received, self._received = self._received, Received()
        return received

    def build_connector_worker_meta(self) -> KVOffloadWorkerMetadata | None:
        """Return the rank's report for the scheduler side; None without a new report."""
        report, self._report = self._report, None
        return KVOffloadWorkerMetadata((report,)) if report is not None else None

    def close(self) -> None:
        """Wait for the started copies to end, then free host memory."""
        self._identity.cancel()
        try:
            self.offload.close()
        finally:
            self._closed()

    # -- private ------------------------------------------------------------------------------------------------

    def _load_ended(self, job: JobId, *, failed: bool) -> None:
        request, blocks = self._loading.pop(job)
        self._received.finished.add(request)
        if failed:
            self._received.failed.add(request)
            self._received.bad_blocks.update(blocks)

    def _keep(self, report: TransferReport) -> None:
        """Add a report to the report that `build_connector_worker_meta` returns."""
        if self._report is None:
            self._report = report
        else:
            self._report = replace(report, jobs=self._report.jobs + report.jobs)
