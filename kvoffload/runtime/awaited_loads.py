"""The loads that the engine waits for: each is answered exactly once, even if the core breaks meanwhile (R9, R12)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from kvoffload.core.state import LoadResults
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.transfer import DeviceJob


class LoadAnswers(Struct):
    """Loads that ended, each started load once, also of requests that are gone.

    Args:
        loaded, failed: their requests.
        without_copy: those among them whose load no worker was given, so that no worker reports it.
        abandoned: jobs that answered loads leave behind with workers that still copy.
    """

    loaded: list[RequestId] = []
    failed: list[RequestId] = []
    without_copy: list[RequestId] = []
    abandoned: list[JobId] = []


NO_ANSWERS = LoadAnswers()
"""What most steps have. It stays empty."""


class AwaitedLoads:
    """Requests that were allocated with external tokens and not answered since, each with its job once that is submitted.

    Args:
        open_jobs: the jobs that some rank still copies.
    """

    def __init__(self, open_jobs: Collection[JobId]) -> None:
        self._open_jobs = open_jobs
        self._jobs: dict[RequestId, JobId | None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._jobs)

    def began(self, request: RequestId) -> None:
        """The engine waits for a load."""
        self._jobs[request] = None

    def submitted(self, loads: Iterable[DeviceJob]) -> None:
        """The workers are given these loads."""
        for load in loads:
            if load.extra in self._jobs:
                self._jobs[load.extra] = load.id

    def answer(self, results: LoadResults) -> LoadAnswers:
        """Return what the core reports, without what the engine was answered before."""
        answers = LoadAnswers()
        for requests, ended in ((results.loaded, answers.loaded), (results.failed, answers.failed)):
            for request in requests:
                if request not in self._jobs:
                    continue
                ended.append(request)
                job = self._jobs.pop(request)
                if job is None:
                    answers.without_copy.append(request)
                elif job in self._open_jobs:
                    answers.abandoned.append(job)
        return answers
