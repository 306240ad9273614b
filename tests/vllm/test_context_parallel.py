"""Tests decode context parallelism: vLLM's own scheduler, and a worker's side for each rank on the emulated driver.

With it, the ranks share the tokens of full-attention blocks. vLLM's attention on a CPU cannot do this, so no model runs:
each rank's kernels write a pattern into a block that depends on the rank's own tokens, and later check what they read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.model.config import OffloadConfig
from kvoffload.model.ids import JobId, Rank
from kvoffload.model.wire import Direction
from kvoffload.runtime.worker_side import WorkerSide
from kvoffload.testing import FakeClock
from kvoffload.transfer import factory
from tests.cuda_emulator import Emulator, Engine, build
from tests.runtime.manual_portal import ManualPortal
from tests.vllm.engine_rig import MARKS, prompt
from tests.vllm.line_rig import Line, make_scheduler, scheduling
from tests.vllm.scheduler_rig import BLOCK, full_spec

pytestmark = MARKS

RANKS, SHARES = 4, 2
"""Each head of the model's KV is on two of the four ranks, and these two share the tokens."""
DEVICE_BLOCKS, HOST_BLOCKS = 47, 64
SHARED = {"tensor_parallel_size": RANKS, "decode_context_parallel_size": SHARES}


class Worker:
    """A rank with its own KV memory and stream."""

    def __init__(self, emulator: Emulator, rank: int, patch: pytest.MonkeyPatch) -> None:
        self.engine = Engine(emulator, rank % 2, DEVICE_BLOCKS + 1)  # the emulator has two devices
        patch.setattr(factory, "current_stream", lambda device: lambda: self.engine.stream)
        clock = FakeClock()
        self.portal = ManualPortal(clock)
        config = OffloadConfig(host_bytes=RANKS * HOST_BLOCKS * self.engine.layout.slot_bytes)
        self.side = WorkerSide(Rank(rank), RANKS, config, self.portal, clock=clock)
        assert self.side.register(self.engine.layout) == HOST_BLOCKS

    def close(self) -> None:
        self.side.close()
        self.portal.close()


@dataclass
class Shards(Line):
    """A scheduler with one worker for each rank."""

    emulator: Any = None
    workers: Sequence[Worker] = ()
    interleave: int = 1
    names: dict[JobId, str] = field(default_factory=dict)
    ended: dict[JobId, int] = field(default_factory=dict)

    def _run(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        from kvoffload_vllm.metadata import KVOffloadWorkerMetadata

        plan = output.kv_connector_metadata.plan
        self.names |= {job.id: job.extra for job in plan.loads}
        reports = []
        for rank, worker in enumerate(self.workers):
            worker.engine.enter()
            worker.side.begin_step(plan)
            self._compute(output, rank, worker.engine)
            worker.side.start_loads(plan)
            worker.side.start_stores(plan)
            self.emulator.step()
            worker.portal.advance()
            if (report := worker.side.take_report()) is not None:
                reports.append(report)
        jobs = [job for report in reports for job in report.jobs if job.direction is Direction.LOAD]
        for job in jobs:
            self.ended[job.job] = self.ended.get(job.job, 0) + 1
        received = {
            self.names.pop(job) for job, ranks in self.ended.items() if ranks == RANKS and job in self.names
        }
        return KVConnectorOutput(
            finished_recving=received,
            kv_connector_worker_meta=KVOffloadWorkerMetadata(tuple(reports)) if reports else None,
        )

    def _compute(self, output: Any, rank: int, engine: Engine) -> None:
        """Let a rank's kernels read the blocks that the step's requests have, and write those that the step completes."""
        manager = self.scheduler.kv_cache_manager
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            until = request.num_computed_tokens
            tables = manager.get_block_ids(name)
            for group, one in zip(self.core.state.shape.groups, tables, strict=True):
                for place, block in enumerate(one[: until // group.block_tokens]):
                    end = (place + 1) * group.block_tokens
                    seed = self.seed(request.all_token_ids[:end], rank, group.block_tokens > BLOCK)
                    if block and end > until - tokens:
                        engine.write(block, seed)
                    elif block:
                        engine.read(block, seed)

    def seed(self, tokens: Sequence[int], rank: int, is_shared: bool) -> int:
        """Return the pattern of a block that ends after `tokens`: of the rank's head and of the tokens that the rank has."""
        share = rank % SHARES
        own = [one for n, one in enumerate(tokens) if n // self.interleave % SHARES == share or not is_shared]
        return zlib.crc32(repr((rank // SHARES, own)).encode())

    @property
    def problems(self) -> tuple[int, int, int]:
        return self.emulator.races, self.emulator.wrong, self.emulator.faults


@contextmanager
def sharing(folder: Path, specs: Sequence[Any], **options: Any) -> Iterator[Shards]:
    """Yield a scheduler whose ranks share the tokens of full-attention blocks."""
    emulator = Emulator(build())
    emulator.reset(stepped=True)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(emulator.reset, stepped=True)
        workers = [Worker(emulator, rank, patch) for rank in range(RANKS)]
        for worker in workers:
            stack.callback(worker.close)
        scheduler = make_scheduler(folder, specs, DEVICE_BLOCKS, **SHARED, **options)
        stack.callback(scheduler.connector.shutdown)
        interleave = scheduler.vllm_config.parallel_config.cp_kv_cache_interleave_size
        line = Shards(scheduler, emulator=emulator, workers=workers, interleave=interleave)
        while line.core.state.pool.capacity < HOST_BLOCKS:  # the ranks report their host memory with a step
            line.ask("first", [1])
            assert line.finish()
        yield line


def of_draft_model(spec: Any) -> Any:
    """Return the spec of a draft model's layers, of which each rank has all tokens."""
    if not hasattr(spec, "dcp_sharded"):
        pytest.skip("this vLLM shares all layers' tokens among the ranks")
    return replace(spec, dcp_sharded=False)


GROUPS: Mapping[str, Any] = {
    "full": lambda: [full_spec()],
    "draft": lambda: [full_spec(), of_draft_model(full_spec())],  # vLLM refuses sliding windows
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("options", [{}, {"cp_kv_cache_interleave_size": 16}], ids=["interleave 1", "16"])
def test_each_rank_gets_its_own_tokens_back(folder: Path, kind: str, options: dict[str, Any]) -> None:
    with sharing(folder, GROUPS[kind](), **options) as line:
        sizes = [group.block_tokens for group in line.core.state.shape.groups]
        assert sizes == [SHARES * BLOCK, BLOCK][: len(sizes)]
        texts = [prompt(number, 64 * number + 70) for number in range(4)]
        line.put_on_host_only(*texts)
        for number, text in enumerate(texts):
            line.ask(f"r{number}", (*text, *prompt(9, 40)), 3)
        assert line.finish()
        assert [line.cached[f"r{number}"] for number in range(4)] == [64, 128, 192, 256]
        assert line.problems == (0, 0, 0), line.emulator.report
        assert line.core.audit() == []
        assert line.free_blocks == DEVICE_BLOCKS


def test_bytes_of_another_rank_are_noticed(folder: Path) -> None:
    with sharing(folder, [full_spec()]) as line:
        text = prompt(1, 70)
        line.put_on_host_only(text)
        arenas = [worker.side.pump._arena for worker in line.workers[:2]]
        for slot in line.core.state.pool.index.values():
            for one, other in zip(*[arena.pages(slot) for arena in arenas], strict=True):
                mine, theirs = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
                mine[:], theirs[:] = theirs.copy(), mine.copy()
        line.ask("r", (*text, 1))
        assert line.finish()
        assert line.problems[1] > 0


@pytest.mark.parametrize("kind", GROUPS)
def test_hits_are_those_of_one_rank_in_units_of_a_shared_block(folder: Path, kind: str) -> None:
    """The number of ranks changes where tokens lie, and not which prefixes are found."""
    stem, found = prompt(0, 200), list[list[int]]()
    texts = [(*stem[: 50 * number], *prompt(number, 60 * number + 20)) for number in range(5)]
    for lines in (sharing(folder, GROUPS[kind]()), scheduling(folder, GROUPS[kind](), DEVICE_BLOCKS)):
        with lines as line:
            line.put_on_host_only(*texts)
            for number, text in enumerate(texts):
                line.ask(f"r{number}", (*text, *prompt(7, 30)))
            assert line.finish()
            found.append([line.cached[f"r{number}"] for number in range(len(texts))])
    unit = SHARES * BLOCK
    assert found[0] == [tokens - tokens % unit for tokens in found[1]]
    assert sum(found[0]) > 0
