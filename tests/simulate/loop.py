"""An event loop with simulated time and a random order of callbacks. A run can be repeated from its seed."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kvoffload.runtime.portal import Portal, PortalClosed
from tests.gates import ManualExecutor
from tests.runtime.manual_portal import TaskFuture

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_S = 1000.0  # the limit on simulated time, many times longer than the longest run


class Stuck(Exception):
    """Raised when a task waits but no callback or timer is left, for example for a request that hangs."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs ready callbacks, with `draws` in random order. If none is ready, time jumps to the next timer.

    The loop uses no selector, thread or real clock.
    """

    def __init__(self, draws: random.Random | None = None) -> None:
        super().__init__()
        self._draws = draws
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def jump(self, seconds: float) -> None:
        """Advance time without running callbacks, as if the loop's thread were busy."""
        self.now += seconds

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        ready: Any = self._ready  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            _pop(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._jump_to(timers)
        while timers and timers[0].when() <= self.now:
            ready.append(_pop(timers))
        batch = list(ready)
        ready.clear()
        if self._draws is not None:
            self._draws.shuffle(batch)
        for handle in batch:
            if not handle.cancelled():
                handle._run()

    def _jump_to(self, timers: list[asyncio.TimerHandle]) -> None:
        if not timers:
            raise Stuck("every task waits, and no callback or timer is left")
        self.now = max(self.now, timers[0].when())
        if self.now > _LONGEST_S:
            raise Stuck(f"still running after {_LONGEST_S} simulated seconds")

    def _write_to_self(self) -> None:
        """Do nothing: no thread sleeps in a system call."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the loop drops cancelled timers when their time comes."""


def _pop(timers: list[asyncio.TimerHandle]) -> asyncio.TimerHandle:
    handle = heapq.heappop(timers)
    handle._scheduled = False  # type: ignore[attr-defined]
    return handle


class SimClock:
    """A clock with the loop's time, for transfer coroutines."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SimPortal(Portal):
    def __init__(self, loop: SimLoop) -> None:
        super().__init__("simulation")
        self.loop = loop
        self._inline = ManualExecutor(held=False)

    @property
    def is_alive(self) -> bool:
        return not self.loop.is_closed()

    @property
    def executor(self) -> ManualExecutor:
        return self._inline

    def spawn(
        self, async_fn: Callable[P, Coroutine[object, object, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        if not self.is_alive:
            raise PortalClosed(self.name)
        return _Spawned(self.loop, self.loop.create_task(async_fn(*args, **kwargs)))

    def close(self, timeout: float = 10.0) -> bool:
        """Cancel the remaining tasks and wait for them. The loop stays open, because its creator closes it."""
        tasks = asyncio.all_tasks(self.loop)
        for task in sorted(tasks, key=lambda task: task.get_name()):
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        return True


class _Spawned(TaskFuture):
    """The future of a task. Waiting for the future from outside the loop runs the loop."""

    def __init__(self, loop: SimLoop, task: asyncio.Task[Any]) -> None:
        super().__init__(task)
        self._loop = loop

    def result(self, timeout: float | None = None) -> Any:  # noqa: ANN401
        if not self.done():
            self._loop.run_until_complete(asyncio.wait([self._task], timeout=timeout))
        return super().result(0)
