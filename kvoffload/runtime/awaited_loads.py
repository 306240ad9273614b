"""The loads that the engine waits for: each is answered exactly once, even if the core breaks meanwhile (R9, R12)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvoffload.core.state import LoadResults
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.transfer import TransferJob


@dataclass(slots=True)
class LoadAnswers:
    """Loads that ended, each started load once, also of requests that are gone.

    Args:
        loaded, failed: their requests.
        without_copy: those among them whose load no worker was given, so that no worker reports it.
        abandoned: jobs that answered loads leave behind with workers that still copy.
    """

    loaded: list[RequestId] = field(default_factory=list)
    failed: list[RequestId] = field(default_factory=list)
    without_copy: list[RequestId] = field(default_factory=list)
    abandoned: list[JobId] = field(default_factory=list)


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

    def began(self, request: RequestId) -> None:
        """The engine waits for a load."""
        self._jobs[request] = None

    def submitted(self, loads: Iterable[TransferJob]) -> None:
        """The workers are given these loads."""
        for load in loads:
            if load.request in self._jobs:
                self._jobs[load.request] = load.job

    def answer(self, results: LoadResults) -> LoadAnswers:
        """Return what the core reports, without what the engine was answered before."""
        answers = LoadAnswers()
        for request in results.loaded:
            self._answer(request, answers.loaded, answers)
        for request in results.failed:
            self._answer(request, answers.failed, answers)
        return answers

    def fail_all(self, answers: LoadAnswers) -> None:
        """The core is broken, and what it planned is not to be trusted: add all that is awaited as failed."""
        for request in tuple(self._jobs):
            self._answer(request, answers.failed, answers)

    def _answer(self, request: RequestId, ended: list[RequestId], answers: LoadAnswers) -> None:
        if request not in self._jobs:
            return
        ended.append(request)
        job = self._jobs.pop(request)
        if job is None:
            answers.without_copy.append(request)
        elif job in self._open_jobs:
            answers.abandoned.append(job)
