"""Tests how vLLM handles the reports of several workers, in any order, after vLLM's own aggregation has
merged them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvoffload.disk.folder import DiskPlace
from kvoffload.disk.identity import KVIdentity
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.ids import DeviceBlockId, JobId, Rank, RequestId
from kvoffload.model.wire import Direction, JobReport, TransferPlan, TransferReport
from kvoffload.runtime.copies import LoadAnswers
from tests.copy_jobs import device_job
from tests.vllm.engine_rig import MARKS

if TYPE_CHECKING:
    from kvoffload_vllm.worker import VllmWorker

pytestmark = MARKS

IDENTITY = KVIdentity("engine", "weights", "keys", {"tensor": 2})

LOAD = JobId(7)
BLOCKS = (DeviceBlockId(3), DeviceBlockId(4))
REQUEST = RequestId("request")


class Copies:
    """Stands in for a rank's worker side. The test ends its copies."""

    def __init__(self, rank: int) -> None:
        self._rank = Rank(rank)
        self._ended: list[JobReport] = []

    def end(self, outcome: CopyOutcome) -> None:
        self._ended.append(JobReport(LOAD, Direction.LOAD, outcome, 0, 0.0, 0.0))

    def start_loads(self, plan: TransferPlan) -> None:
        pass

    begin_step = start_stores = start_loads

    def take_report(self) -> TransferReport | None:
        ended, self._ended = tuple(self._ended), []
        return TransferReport(self._rank, ended, 8) if ended else None

    def close(self) -> None:
        pass


class Workers:
    def __init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        from kvoffload_vllm.worker import VllmWorker

        self.copies = [Copies(rank) for rank in range(2)]
        self._workers = [VllmWorker(one, lambda: None, lambda _: ()) for one in self.copies]  # type: ignore[arg-type]
        self._join = KVOutputAggregator(expected_finished_count=2)

    def step(self, **reported: Any) -> Any:
        """Run a step with this metadata on all workers; return the output that vLLM's aggregation makes."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvoffload_vllm.metadata import KVOffloadMetadata

        outputs = []
        for worker in self._workers:
            worker.bind(KVOffloadMetadata(**reported))
            worker.start_load_kv(None)
            worker.wait_for_save()
            received = worker.take_received()
            output = KVConnectorOutput(
                finished_recving=received.finished or None,
                failed_recving=received.failed,
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear()
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output))
        return self._join.aggregate(outputs).kv_connector_output


def load(request: RequestId | None = REQUEST) -> dict[str, Any]:
    job = device_job(LOAD, Direction.LOAD, (0, 1), BLOCKS, request)
    return {"plan": TransferPlan(loads=(job,))}


def ranks_reported(output: Any) -> list[int]:
    meta = output.kv_connector_worker_meta
    return [report.rank for report in meta.reports] if meta is not None else []


@pytest.mark.parametrize("outcomes", list(itertools.product(CopyOutcome, repeat=2)), ids=str)
@pytest.mark.parametrize("steps", [[{0}, {1}], [{1}, {0}], [{0, 1}]], ids=str)
def test_a_request_resumes_when_the_last_rank_has_ended_its_copy(
    outcomes: Sequence[CopyOutcome], steps: Sequence[set[int]]
) -> None:
    """In each step, the copies of some ranks end. That step's output has these ranks' reports."""
    workers = Workers()
    assert workers.step(**load()).finished_recving is None
    for ended in steps:
        for rank in ended:
            workers.copies[rank].end(outcomes[rank])
        output = workers.step()
        assert ranks_reported(output) == sorted(ended)
        if ended is not steps[-1]:
            assert output.finished_recving is None
            assert not output.failed_recving
    assert output.finished_recving == {REQUEST}
    assert bool(output.failed_recving) == (tuple(outcomes) != (CopyOutcome.DONE, CopyOutcome.DONE))
    after = workers.step()
    assert after.finished_recving is None
    assert ranks_reported(after) == []


def test_reports_that_were_not_taken_are_merged_with_later_ones() -> None:
    from kvoffload_vllm.worker import VllmWorker

    stored = [JobReport(JobId(job), Direction.STORE, CopyOutcome.DONE, 0, 0.0, 0.0) for job in (1, 2)]
    reported = [
        TransferReport(Rank(0), (stored[0],), 4, 0.5),
        TransferReport(Rank(0), (stored[1],), 8, 0.75),
    ]
    copies = Copies(0)
    copies.take_report = lambda: reported.pop(0) if reported else None  # type: ignore[method-assign]
    worker = VllmWorker(copies, lambda: None, lambda _: ())  # type: ignore[arg-type]
    for _ in range(3):
        worker.take_received()
    meta = worker.build_connector_worker_meta()
    assert meta is not None
    (report,) = meta.reports
    assert [part.job for part in report.jobs] == [1, 2]
    assert (report.ready_slots, report.store_share) == (8, 0.75)
    assert worker.build_connector_worker_meta() is None


def test_r13_a_step_begins_when_its_plan_is_bound() -> None:
    """Runner V2 starts loads only after it has enqueued the forward pass and later work. The loads must not
    wait for that work.
    """
    from kvoffload_vllm.metadata import KVOffloadMetadata
    from kvoffload_vllm.worker import VllmWorker

    copies, called = Copies(0), []
    for name in ("begin_step", "start_loads", "start_stores"):
        setattr(copies, name, lambda plan, name=name: called.append(name))
    worker = VllmWorker(copies, lambda: None, lambda _: ())  # type: ignore[arg-type]
    worker.bind(KVOffloadMetadata(**load()))
    assert called == ["begin_step"]
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert called == ["begin_step", "start_loads", "start_stores"]


def test_a_worker_waits_for_the_identity_before_it_opens_the_disks_folder(tmp_path: Path) -> None:
    from kvoffload_vllm.metadata import KVOffloadMetadata

    worker, place = worker_with_disk(tmp_path)
    with ThreadPoolExecutor() as pool:
        folder = pool.submit(place.make_folder)
        assert not folder.done()
        for _ in range(2):
            worker.bind(KVOffloadMetadata(disk=IDENTITY))
        assert folder.result().path == tmp_path / IDENTITY.fingerprint / "replica0"


def test_a_worker_that_closes_does_not_wait_for_the_identity(tmp_path: Path) -> None:
    from kvoffload_vllm.metadata import KVOffloadMetadata

    worker, place = worker_with_disk(tmp_path)
    with ThreadPoolExecutor() as pool:
        folder = pool.submit(place.make_folder)
        worker.close()
        with pytest.raises(CancelledError):
            folder.result()
    worker.bind(KVOffloadMetadata(disk=IDENTITY))


def worker_with_disk(root: Path) -> tuple[VllmWorker, DiskPlace]:
    from kvoffload_vllm.worker import VllmWorker

    identity: Future[KVIdentity] = Future()
    worker = VllmWorker(Copies(0), lambda: None, lambda _: (), identity)  # type: ignore[arg-type]
    return worker, DiskPlace(root, identity.result)


@pytest.mark.parametrize("ended", [(), (0,), (1,)])
def test_an_abandoned_load_is_reported_once_by_each_rank(ended: Sequence[int]) -> None:
    """A rank that has already reported its copy does not report it again."""
    workers = Workers()
    workers.step(**load())
    for rank in ended:
        workers.copies[rank].end(CopyOutcome.DONE)
    workers.step()
    end = workers.step(answers=LoadAnswers(failed=[REQUEST], abandoned=[LOAD]))
    assert end.finished_recving == {REQUEST}
    assert end.failed_recving == {REQUEST}
    late = [rank for rank in range(2) if rank not in ended]
    for rank in late:
        workers.copies[rank].end(CopyOutcome.DONE)
    after = workers.step()
    assert after.finished_recving is None
    assert ranks_reported(after) == late, "the core gives the memory back when it hears of the end"


def test_a_load_without_a_copy_is_reported_by_every_rank() -> None:
    workers = Workers()
    assert workers.step(answers=LoadAnswers(loaded=[REQUEST], without_copy=[REQUEST])).finished_recving == {
        REQUEST
    }
    end = workers.step(answers=LoadAnswers(failed=[REQUEST], without_copy=[REQUEST]))
    assert (end.finished_recving, end.failed_recving) == ({REQUEST}, {REQUEST})


@pytest.mark.parametrize("outcome", [CopyOutcome.DONE, CopyOutcome.FAILED])
def test_vllm_hears_of_a_load_in_parts_only_from_its_last_part_or_from_the_scheduler(
    outcome: CopyOutcome,
) -> None:
    workers = Workers()
    workers.step(**load(None))
    for copies in workers.copies:
        copies.end(outcome)
    end = workers.step()
    assert (end.finished_recving, end.failed_recving) == (None, set())
    assert ranks_reported(end) == [0, 1]
    end = workers.step(answers=LoadAnswers(failed=[REQUEST], without_copy=[REQUEST]))
    assert (end.finished_recving, end.failed_recving) == ({REQUEST}, {REQUEST})


def test_metadata_can_be_pickled() -> None:
    import pickle

    from kvoffload_vllm.metadata import KVOffloadMetadata, KVOffloadWorkerMetadata

    plan = KVOffloadMetadata(**load())
    assert pickle.loads(pickle.dumps(plan)) == plan
    reports = (TransferReport(Rank(0), (JobReport(LOAD, Direction.LOAD, CopyOutcome.DONE, 0, 0.0, 0.0),), 3),)
    assert pickle.loads(pickle.dumps(KVOffloadWorkerMetadata(reports))).reports == reports
