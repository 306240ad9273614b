"""Tests kvoffload's tier below vLLM's own `OffloadingConnector`.

Only the copies between device and host are replaced, as for the `fs` tier (`tests/vllm/stock/fs_peer.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.disk.slot_file import SlotFile
from kvoffload.model.errors import ConfigError
from tests.captured_logs import capture_logs
from tests.core.audit import audit_host
from tests.gates import ThreadGate
from tests.remote.fake_store import FakeStore
from tests.vllm.engine_rig import MARKS, SLOT_BYTES, check_threads_gone, prompt
from tests.vllm.stock import checkpoints, engines

tiers = pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="this vLLM has no such tiers")
LookupResult, ReqContext = tiers.LookupResult, tiers.ReqContext
is_here = hasattr(tiers.SecondaryTierManager, "config_info") and not engines.IS_V2_RUNNER

pytestmark = [*MARKS, pytest.mark.skipif(not is_here, reason="for vLLM 0.33 and later, on runner V1")]

BLOCKS = 6
HOST_CHUNKS = 12
TOKENS = 8
KILLS = int(os.environ.get("KVOFFLOAD_TIER_KILLS", "20"))
SEED = 7
PROMPTS = [prompt(seed, BLOCKS * engines.BLOCK + 9) for seed in range(3)]
OTHERS = [prompt(seed, 10 * engines.BLOCK + 9) for seed in range(10, 16)]


@dataclass
class Life:
    llm: Any

    @property
    def tier(self) -> Any:
        (tier,) = engines.scheduler_of(self.llm).connector.connector_scheduler.manager.secondary_tiers
        return tier

    def ask(self, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[engines.Answer]:
        """Send these prompts one at a time, each after all copies have ended. Return the answers."""
        answers = []
        for one in prompts:
            answers += engines.generate(self.llm, [one], TOKENS)
            engines.drain(self.llm)
        return answers

    def push_out(self) -> None:
        """Evict the prompts' blocks from device and host, so that only the tier has them."""
        self.ask(OTHERS)
        assert engines.scheduler_of(self.llm).reset_prefix_cache()

    def count(self, *labels: str) -> float:
        return self.tier._cache.counters.snapshot().count("kvoffload_tier_blocks_total", *labels)


@contextmanager
def living(
    folder: Path,
    *,
    seed: int = 0,
    store: FakeStore | None = None,
    engine: Mapping[str, object] | None = None,
    **settings: object,
) -> Iterator[Life]:
    """Run an engine with the tier on a folder or on a remote tier during the `with` block.

    The engine's process counts as started now, because weights that are newer than the process are refused.
    """
    from tests.vllm.stock import fs_peer

    tier: dict[str, object] = {"type": "KVOffloadTier", "module_path": "kvoffload_vllm.secondary_tier"}
    tier |= {"disk_path": str(folder / "disk"), "disk_bytes": "8MiB"} if store is None else REMOTE
    transfer = fs_peer.kv_transfer(HOST_CHUNKS * SLOT_BYTES, folder, {**tier, **settings})
    options = {"num_gpu_blocks_override": 40, "max_model_len": 512, **(engine or {})}
    checkpoint = checkpoints.make("qwen3", folder / f"model{seed}", seed=seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)
        # Use the smallest number of staging slots, so that most blocks must be read from the disk.
        patched.setattr("kvoffload.tier_cache._STAGING_BYTES", 0)
        for side in ("tier_kinds", "remote_catalog") if store is not None else ():
            patched.setattr(f"kvoffload.runtime.{side}.open_store", lambda *_: store)
        with engines.in_process(checkpoint, kv_transfer_config=transfer, **options) as llm:
            life = Life(llm)
            # vLLM sets the hash seed before its first step, and the tier can open only after that step.
            life.ask([(1, 2, 3)])
            assert life.tier._cache.wait_open(60.0)
            yield life
    check_threads_gone()


def tokens(answers: Sequence[engines.Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def cached(answers: Sequence[engines.Answer]) -> list[int]:
    return [answer.cached for answer in answers]


REMOTE = {"remote_url": "s3://bucket/blocks", "remote_timeout_s": 10.0}
ALL = [BLOCKS * engines.BLOCK] * len(PROMPTS)
NONE = [0] * len(PROMPTS)


def test_scene_of_qwen3_blocks_evicted_from_the_host_are_found_on_the_tier(tmp_path: Path) -> None:
    with living(tmp_path) as life:
        expected = life.ask()
        assert cached(expected) == NONE
        life.push_out()
        found = life.ask()
        assert (tokens(found), cached(found)) == (tokens(expected), ALL)
        assert life.count("disk", "load", "done") >= len(PROMPTS) * (BLOCKS - 1)
        stats = life.tier.get_stats().data
        assert set(stats["data"]) <= set(life.tier.build_metric_definitions({}))
        assert life.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        again = life.ask()
        assert (tokens(again), cached(again)) == (tokens(expected), NONE), "nothing is found after a reset"
        assert audit_host(life.tier._cache._state) == []


@dataclass(frozen=True)
class Before:
    """The folder that a first engine has left, and this engine's answers."""

    folder: Path
    answers: list[engines.Answer]

    def copy(self, folder: Path) -> Path:
        return shutil.copytree(self.folder, folder / "copy")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    folder = tmp_path_factory.mktemp("before")
    with living(folder) as life:
        return Before(folder, life.ask())


@pytest.mark.full
def test_a_second_engine_finds_the_first_engines_blocks(before: Before, tmp_path: Path) -> None:
    with living(before.copy(tmp_path)) as life:
        found = life.ask()
        assert (tokens(found), cached(found)) == (tokens(before.answers), ALL)
        assert life.count("disk", "store", "done") <= 1, "what is there is not written again"


@pytest.mark.full
def test_r18_other_weights_find_nothing(before: Before, tmp_path: Path) -> None:
    folder = before.copy(tmp_path)
    with living(folder, seed=1) as life:
        assert cached(life.ask()) == NONE
    with living(folder) as life:
        assert cached(life.ask()) == ALL


@pytest.mark.full
def test_r17_flipped_bytes_are_computed_again(
    before: Before, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = before.copy(tmp_path)
    (path,) = flipped.rglob("slots0")
    data = bytearray(path.read_bytes())
    signs = slice(4096 + 3, None, 4)  # the sign byte of each float32, after the file's header
    data[signs] = bytes(byte ^ 0x80 for byte in data[signs])
    path.write_bytes(data)
    with capture_logs() as lines, living(shutil.copytree(flipped, tmp_path / "life")) as life:
        found = life.ask()
        assert (tokens(found), cached(found)) == (tokens(before.answers), NONE)
        assert life.count("disk", "load", "corrupt") > 0
    assert "tier_copy_failed" in {line["event"] for line in lines}

    # As a control, check that without comparing checksums the answers differ.
    monkeypatch.setattr("kvoffload.transfer.disk.are_equal", lambda *_: True)
    with living(shutil.copytree(flipped, tmp_path / "control")) as life:
        assert tokens(life.ask()) != tokens(before.answers)


@pytest.mark.full
@pytest.mark.parametrize("what", ["read", "write"])
def test_r17_a_hanging_disk_only_costs_hits(
    before: Before, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gate = ThreadGate()
    monkeypatch.setattr(SlotFile, what, lambda *_: gate.arrive())
    with capture_logs() as lines, living(before.copy(tmp_path), transfer_timeout_s=1.0) as life:
        answers = life.ask(PROMPTS if what == "read" else [*OTHERS, *PROMPTS])[-len(PROMPTS) :]
        assert tokens(answers) == tokens(before.answers)
        if what == "read":
            assert cached(answers) == NONE
        gate.wait_for_arrivals(1)
        while "disk_call_hangs" not in {line["event"] for line in lines}:
            life.ask([(1, 2, 3)])  # the tier looks at its calls in the engine's steps
        monkeypatch.undo()
        gate.open()


@pytest.mark.full
def test_a_second_engine_finds_the_first_engines_blocks_in_a_store(before: Before, tmp_path: Path) -> None:
    store = FakeStore()
    with living(tmp_path, store=store) as life:
        assert tokens(life.ask()) == tokens(before.answers)
    with living(tmp_path, store=store) as life:
        found = life.ask()  # each lookup waits until the remote tier answers
        assert (tokens(found), cached(found)) == (tokens(before.answers), ALL)
        assert life.count("remote", "load", "done") > 0


@pytest.mark.full
def test_events_report_blocks_stored_on_the_disk_and_removed_from_it(tmp_path: Path) -> None:
    publishes = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with living(tmp_path, engine=publishes, enable_kv_events=True, disk_bytes=4096 + 10 * SLOT_BYTES) as life:
        taken: list[Any] = []
        real = life.tier.take_events

        def take_events() -> Iterator[Any]:
            for event in real():
                taken.append(event)
                yield event

        life.tier.take_events = take_events
        life.ask()
        came = [key for event in taken if not event.removed for key in event.keys]
        left = [key for event in taken if event.removed for key in event.keys]
        assert len(came) == len(PROMPTS) * BLOCKS
        assert set(left) <= set(came)
        assert len(came) - len(left) == 10, "the disk has ten slots"
        assert {event.medium.value for event in taken} == {"STORAGE"}


DISK_BYTES = 4096 + 48 * SLOT_BYTES
"""The disk has too few slots for all prompts, so blocks are written until the kill."""


def live_until_killed(folder: str, expected: str) -> None:
    """Check the answers, print how many tokens were found, and serve until the process is killed."""
    right = [tuple(one) for one in json.loads(expected)]
    with living(Path(folder), disk_bytes=DISK_BYTES) as life:
        answers = life.ask()
        assert tokens(answers) == right
        sys.stdout.write(f"found {sum(cached(answers))}\n")
        sys.stdout.flush()
        while True:
            life.ask(OTHERS)
            assert tokens(life.ask()) == right


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_after_a_kill_at_any_moment_the_tokens_are_right(before: Before, tmp_path: Path) -> None:
    chance, found = random.Random(SEED), list[int]()
    child = f"import sys; from {__name__} import live_until_killed; live_until_killed(*sys.argv[1:])"
    command = [sys.executable, "-c", child, str(tmp_path), json.dumps(tokens(before.answers))]
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("found "))
            found.append(int(line.split()[1]))
            with pytest.raises(subprocess.TimeoutExpired):  # The process serves until it is killed.
                process.wait(chance.uniform(0.0, 4.0))
            process.kill()
    with living(tmp_path, disk_bytes=DISK_BYTES) as life:
        answers = life.ask()
        assert tokens(answers) == tokens(before.answers)
        found.append(sum(cached(answers)))
    assert found[0] == 0
    assert sum(found) > 0


class Jobs:
    """Gives jobs to a tier and takes their results, in place of vLLM's manager."""

    def __init__(self, life: Life) -> None:
        self.tier = life.tier
        self.context = ReqContext("a request")
        self._numbers = itertools.count(1_000_000)
        self._ended: dict[int, Any] = {}

    def start(self, keys: Sequence[Any], chunks: Sequence[int], *, is_load: bool = False) -> int:
        number = next(self._numbers)
        job = tiers.TransferJob(number, keys, np.array(chunks), is_load, self.context)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return number

    def ended(self) -> dict[int, Any]:
        """Return the results of all jobs that have ended."""
        self._ended |= {result.job_id: result for result in self.tier.get_finished_jobs()}
        return self._ended

    def result(self, number: int) -> Any:
        """Wait for a job's end."""
        while number not in self.ended():
            os.sched_yield()
        return self._ended[number]

    def run(self, keys: Sequence[Any], chunks: Sequence[int], *, is_load: bool = False) -> Any:
        return self.result(self.start(keys, chunks, is_load=is_load))

    def has(self, *keys: Any) -> list[bool]:
        return [self.tier.lookup(key, self.context) == LookupResult.HIT for key in keys]


KEYS = [sha256(b"%d" % number).digest() for number in range(8)]


def test_an_exception_in_the_tiers_threads_costs_hits_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("the memory is gone")

    with capture_logs() as lines, living(tmp_path) as life:
        expected = life.ask()
        life.push_out()
        with monkeypatch.context() as patched:
            for name in ("get", "put"):
                patched.setattr(life.tier._cache, name, fail)
            found = life.ask()
            assert (tokens(found), cached(found)) == (tokens(expected), NONE)
        life.push_out()
        found = life.ask()
        assert (tokens(found), cached(found)) == (tokens(expected), ALL)
    (line,) = (line for line in lines if line["event"] == "tier_copy_failed")
    assert line["reason"] == "ValueError: the memory is gone"


def test_while_requests_are_live_a_step_sends_a_few_metrics(tmp_path: Path) -> None:
    with living(tmp_path) as life:
        life.ask()
        life.tier._failed["a request"] = set()
        counted, sent = life.tier._counted, []
        counted.next_s = counted.now()
        while counted.now() >= counted.next_s:
            sent.append(set(life.tier.get_stats().data["data"]))
        assert life.tier.get_stats().is_empty()
        life.tier._failed.clear()
    assert len(sent) > 1
    assert max(map(len, sent)) <= 10


def test_statistics_that_raise_end_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ValueError("no metrics")

    with capture_logs() as lines, living(tmp_path) as life:
        monkeypatch.setattr(life.tier._counted, "take", fail)
        assert [life.tier.get_stats().is_empty() for _ in range(2)] == [True, True]
    (line,) = (line for line in lines if line["event"] == "observer_removed")
    assert line["error"] == "ValueError('no metrics')"


def test_open_stores_have_a_bound_in_bytes_and_further_stores_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = ThreadGate(), SlotFile.write

    def held(self: SlotFile, slot: int, data: Sequence[memoryview]) -> None:
        gate.arrive()
        real(self, slot, data)

    with capture_logs() as lines, living(tmp_path) as life:
        monkeypatch.setattr(
            "kvoffload_vllm.secondary_tier._LEAST_BYTES", 0
        )  # this leaves a quarter: three chunks
        monkeypatch.setattr(SlotFile, "write", held)
        jobs = Jobs(life)
        accepted = [jobs.start(KEYS[:1], [0]), jobs.start(KEYS[1:3], [1, 2])]
        gate.wait_for_arrivals(1)
        refused = [jobs.start(KEYS[3:4], [3]), jobs.start(KEYS[4:5], [4])]
        load = jobs.start(KEYS[5:6], [5], is_load=True)
        assert jobs.result(load).success is False  # a load is not refused, it finds nothing
        assert {number: result.success for number, result in jobs.ended().items()} == {
            load: False,
            **dict.fromkeys(refused, False),
        }
        gate.open()
        assert [jobs.result(number).success for number in accepted] == [True, True]
        assert jobs.run(KEYS[3:8], [3, 4, 5, 6, 7]).success, (
            "a store that is alone is accepted whatever its size"
        )
        assert all(jobs.has(*KEYS))
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["tier_call_refused"]


def test_keys_and_chunks_that_are_none_cost_only_themselves(tmp_path: Path) -> None:
    with capture_logs() as lines, living(tmp_path) as life:
        jobs, odd = Jobs(life), [b"", b"k" * 65, "text"]
        for number, key in enumerate(odd):
            assert jobs.run([KEYS[number], key], [0, 1]).success is False
            assert jobs.has(KEYS[number], key) == [True, False]
            loaded = jobs.run([KEYS[number], key], [2, 3], is_load=True)
            assert (loaded.success, loaded.successful_keys) == (False, (KEYS[number],))
        for chunk in (HOST_CHUNKS, -1, -2):
            assert jobs.run(KEYS[4:5], [chunk]).success is False
        assert jobs.run(KEYS[4:6], [0]).success is False
        assert jobs.has(*KEYS[4:6]) == [False, False]
        assert jobs.run(KEYS[4:6], [0, 1]).success
        assert jobs.has(*KEYS[4:6]) == [True, True]
    warned = [line["reason"] for line in lines if line["event"] == "tier_call_refused"]
    assert len(warned) == 3, warned  # of a key, of a page, and of a count


def test_a_forked_child_ends_its_jobs_at_once_and_waits_for_nothing(tmp_path: Path) -> None:
    with living(tmp_path) as life:
        jobs = Jobs(life)
        assert jobs.run(KEYS[:1], [0]).success
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends a child that hangs
            try:
                found = [jobs.has(KEYS[0]), jobs.run(KEYS[:1], [0]).success]
                found.append(jobs.run(KEYS[:1], [0], is_load=True).success)
                jobs.tier.drain_jobs()
                jobs.tier.shutdown()
                os._exit(found != [[False], False, False])
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert jobs.has(KEYS[0]) == [True]


def test_without_the_engines_configuration_the_start_is_refused() -> None:
    from kvoffload_vllm.secondary_tier import _config_of_caller

    with pytest.raises(ConfigError, match="cannot be found"):
        _config_of_caller()


@pytest.mark.full
def test_unsupported_settings_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean disk_bytes"), living(tmp_path, disk_byte=1):
        pass
    with pytest.raises(ConfigError, match="LoRA"), living(tmp_path, engine={"enable_lora": True}):
        pass
