"""A portal without a thread. The portal's tasks run on the test's thread when the test advances time."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from anyio.to_thread import current_default_thread_limiter

from kvoffload.runtime.portal import Portal, PortalClosed
from kvoffload.testing import FakeClock
from tests.gates import ManualExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")

_TICK_S = 0.02  # longer than any pause of a transfer coroutine


class ManualPortal(Portal):
    """A portal whose tasks use a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__("manual")
        self.clock = clock
        self.loop = asyncio.new_event_loop()
        self.is_dead = False  # set to True to simulate a dead thread
        self._manual_executor = ManualExecutor(held=False)
        self.extra = ManualExecutor(held=False)  # the executor of the spans' exporter
        self.disks: list[ManualExecutor] = []  # each rank's executor for disk calls
        self.index = ManualExecutor(held=False)  # the executor of the disk's index

    @property
    def is_alive(self) -> bool:
        return not (self.is_dead or self.loop.is_closed())

    @property
    def executor(self) -> ManualExecutor:
        return self._manual_executor

    def new_executor(self, purpose: str, threads: int = 1) -> ManualExecutor:
        if purpose in ("spans", "disk-catalog"):
            return self.extra if purpose == "spans" else self.index
        made = ManualExecutor(held=False)
        if purpose == "disk":
            self.disks.append(made)
        return made

    def spawn(
        self, async_fn: Callable[P, Coroutine[object, object, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        if not self.is_alive:
            raise PortalClosed(self.name)
        return _Running(self, self.loop.create_task(async_fn(*args, **kwargs)))

    def advance(self, seconds: float = _TICK_S) -> None:
        """Let time pass, and run all tasks until they wait again."""
        self.loop.run_until_complete(self._advance(seconds))

    async def _advance(self, seconds: float) -> None:
        threads = current_default_thread_limiter()
        # The journal writes its file on a real thread, which does not see the fake clock.
        while threads.borrowed_tokens:  # noqa: ASYNC110  # anyio has no event for this
            await asyncio.sleep(0)
        await self.clock.advance(seconds)

    def close(self, timeout: float = 10.0) -> bool:
        if not self.loop.is_closed():
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(_all_ended(tasks))
            self.loop.close()
        return True


class TaskFuture(Future[Any]):
    """The future of a task on the test's own loop. Cancelling the future cancels the task."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        super().__init__()
        self._task = task
        task.add_done_callback(self._take)

    def cancel(self) -> bool:
        self._task.cancel()
        return super().cancel()

    def _take(self, task: asyncio.Task[Any]) -> None:
        error: BaseException | None = CancelledError() if task.cancelled() else task.exception()
        if self.cancelled():
            return
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class _Running(TaskFuture):
    """The future of a task. Waiting for the future runs the loop."""

    def __init__(self, portal: ManualPortal, task: asyncio.Task[Any]) -> None:
        super().__init__(task)
        self._portal = portal

    def result(self, timeout: float | None = None) -> Any:  # noqa: ANN401
        end = self._portal.clock.monotonic() + (timeout or 0)
        self._portal.advance(0)
        while not self.done() and (timeout is None or self._portal.clock.monotonic() < end):
            self._portal.advance()
        return super().result(0)


async def _all_ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
