"""Where a plugin's sides are made, and called in their order within a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.engine.plugin import (
    EngineFacts,
    EnginePlugin,
    LoadResults,
    NoPlugin,
    SchedulerPlugin,
    StepFacts,
    WorkerPlugin,
    check_hooks,
)

if TYPE_CHECKING:
    from kvoffload.engine.block_pool import BlockPool
    from kvoffload.engine.runner import Runner


class PluginHost:
    """The scheduler side and the workers' sides of one plugin, or of none."""

    def __init__(
        self, plugin: EnginePlugin | None, facts: EngineFacts, pool: BlockPool, runner: Runner
    ) -> None:
        self.scheduler: SchedulerPlugin = NoPlugin()
        self._workers: list[WorkerPlugin] = []
        if plugin is None:
            return
        check_hooks(plugin, EnginePlugin)
        scheduler = plugin.scheduler_side(facts)
        check_hooks(scheduler, SchedulerPlugin)
        self.scheduler = scheduler
        try:
            self.scheduler.bind(pool)
            for rank in range(facts.ranks):
                worker = plugin.worker_side(facts, rank)
                check_hooks(worker, WorkerPlugin)
                self._workers.append(worker)
                worker.register_kv_caches(runner.rank_tensors(rank))
        except BaseException:
            self.shutdown()  # what was made must not stay behind, half-started
            raise

    def begin_step(self, facts: StepFacts) -> object:
        """Make the step's plan and start its loads; before the forward pass."""
        plan = self.scheduler.plan(facts)
        for worker in self._workers:
            worker.start_loads(plan)
        return plan

    def start_stores(self, plan: object) -> None:
        """Start the plan's stores; after the forward pass was launched."""
        for worker in self._workers:
            worker.start_stores(plan)

    def end_step(self) -> LoadResults:
        """Carry the workers' outputs to the scheduler side."""
        return self.scheduler.update([worker.take_output() for worker in self._workers])

    def shutdown(self) -> None:
        """Shut the workers down, then the scheduler side."""
        for worker in self._workers:
            worker.shutdown()
        self.scheduler.shutdown()
