"""Compares three ways to serve a prompt again after a restart: from our disk tier, from vLLM's tiers, or by
computing it.

vLLM's own connector runs with its `fs` tier, and with kvoffload's `KVOffloadTier`. Every engine is a stock
vLLM with the same model and the same host memory, which is too small for all prompts. On each folder, the
first engine serves prompts that do not return, and serves each returning prompt twice. In each later turn, a
new engine on the same folder serves the returning prompts, while the page cache has none of the folder's files.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvoffload.checks.options import positive
from kvoffload.model.wire import Tier
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out
from tests.bench.vllm_engines import kv_transfer, require_vllm
from tests.vllm.stock import checkpoints, engines

OURS, FS, TIER, NONE = "kvoffload", "fs tier", "our tier", "no connector"
TOKENS = 8
Prompt = Sequence[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk (default: this one)")
    parser.add_argument("--turns", type=positive, default=3, help="engines that return on each folder")
    parser.add_argument("--prompts", type=positive, default=7, help="that return; as many do not")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    require_vllm()
    method = f"{args.prompts} prompts, {args.turns} engines one after the other on each folder, in turns; medians [95 % interval]"
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        found = lines(play(Path(root), Size(), args.turns, args.prompts))
        return give_out("fs", args, method, found, "vllm")


@dataclass(frozen=True)
class Size:
    blocks: int = 64
    # tokens, keys and values, layers, heads, head size, bytes of a float32
    block_bytes: int = engines.BLOCK * 2 * 4 * 8 * 64 * 4
    shape: Mapping[str, int] = field(default_factory=lambda: checkpoints.LARGER)

    def transfer(self, name: str, folder: Path) -> dict[str, Any]:
        """Return the vLLM options that select a connector; empty without a connector.

        All open fetches may fill a quarter of host memory, so host memory has room for four prompts.
        """
        from tests.vllm.stock import fs_peer

        host = 4 * self.blocks * self.block_bytes
        disk = {"disk_path": str(folder), "disk_bytes": 2 * host}
        if name == NONE:
            return {}
        if name == OURS:
            return {"kv_transfer_config": kv_transfer("KVOffloadConnector", host_bytes=host, **disk)}
        tier: dict[str, object] | None = None
        if name == TIER:  # `KVOffloadTier` writes every block, as the `fs` tier does, and needs more space
            tier = {"type": "KVOffloadTier", "module_path": "kvoffload_vllm.secondary_tier"}
            tier |= {**disk, "disk_bytes": 4 * host}
        return {"kv_transfer_config": fs_peer.kv_transfer(host, folder, tier)}


@dataclass
class Side:
    """One side of the comparison: a connector or none, the folder of its engines, and their results."""

    name: str
    folder: Path
    checkpoint: Path
    size: Size
    first_s: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    written: int = 0
    flipped: list[tuple[int, ...]] = field(default_factory=list)
    """The answers of an engine on a damaged folder."""
    not_read: int = 0
    """The number of timed prompts that were not read completely from the disk."""

    def fill(self, prompts: Sequence[Prompt], others: Sequence[Prompt]) -> None:
        with self._living() as llm:
            for prompt, other in zip(prompts, others, strict=True):
                for each in (other, prompt, prompt):
                    serve(llm, each)

    def return_to(self, prompts: Sequence[Prompt]) -> None:
        """Run a new engine that serves prompts from the disk, and record the times and answers.

        The engine serves the last prompt first, without timing.

        Raises:
            RuntimeError: the engine computed a prompt.
        """
        forget_pages(self.folder)
        began = moved("read_bytes")
        with self._living() as llm:
            serve(llm, prompts[-1])
            for prompt in prompts[:-1]:
                before = moved("read_bytes")
                first_s, tokens, cached = serve(llm, prompt)
                self.first_s.append(first_s)
                self.answers.append(tokens)
                if self.name != NONE:
                    if cached < self.size.blocks * engines.BLOCK:
                        raise RuntimeError(f"{self.name}: of a prompt {cached} tokens were found")
                    size = self.size.blocks * self.size.block_bytes
                    self.not_read += moved("read_bytes") - before < size
        self.read.append(moved("read_bytes") - began)

    def return_to_damage(self, prompts: Sequence[Prompt]) -> None:
        """Flip bits in the folder's files, and record the answers of a new engine, whose writes are not counted."""
        flip_bits(self.folder)
        written = self.written
        with self._living() as llm:
            self.flipped = [serve(llm, prompt)[1] for prompt in prompts]
        self.written = written

    def left(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in files_in(self.folder))

    @contextmanager
    def _living(self) -> Iterator[Any]:
        """Run an engine, with an open disk tier, during the `with` block."""
        room = (self.size.blocks + 2) * engines.BLOCK
        options = {
            "num_gpu_blocks_override": 3 * self.size.blocks,
            "kv_cache_memory_bytes": 4 * self.size.blocks * self.size.block_bytes,
            "max_model_len": room,
            "max_num_batched_tokens": room,
            **self.size.transfer(self.name, self.folder),
        }
        before = moved("write_bytes")
        with (
            patch(
                "kvoffload_vllm.kv_identity.process_began_ns",
                time.time_ns,
                # This process wrote the weights, but kvoffload refuses weights that are newer than the process.
                # So `process_began_ns` returns the current time.
            ),
            engines.in_process(self.checkpoint, **options) as llm,
        ):
            serve(llm, [1, 2, 3])
            connector = engines.scheduler_of(llm).connector
            while self.name == OURS and not connector.offload.core.state.by_name[Tier.DISK].is_open:
                serve(llm, [1, 2, 3])
            if self.name == TIER:
                (tier,) = connector.connector_scheduler.manager.secondary_tiers
                assert tier._cache.wait_open(60.0)
            yield llm
        self.written += moved("write_bytes") - before


def serve(llm: Any, prompt: Prompt) -> tuple[float, tuple[int, ...], int]:
    """Serve a prompt until all copies have ended.

    While no request runs, pause for 1 ms after each step, as the loop in vLLM's engine process does.

    Returns:
        The seconds to the first token, the generated tokens, and the number of cached prompt tokens.
    """
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    scheduler, outputs, first_s = engines.scheduler_of(llm), [], 0.0
    began = time.perf_counter()
    llm.llm_engine.add_request(str(time.monotonic_ns()), {"prompt_token_ids": list(prompt)}, wanted)
    while scheduler.has_requests():
        outputs += llm.llm_engine.step()
        if outputs and not first_s:
            first_s = time.perf_counter() - began
        if not scheduler.running:
            time.sleep(0.001)
    return first_s, tuple(outputs[-1].outputs[0].token_ids), outputs[-1].num_cached_tokens or 0


def moved(which: str) -> int:
    """Return the bytes that this process has read from disks or written to disks.

    Args:
        which: "read_bytes" or "write_bytes".
    """
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(each.split(": ") for each in lines)[which])


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def forget_pages(folder: Path) -> None:
    """Evict all files in a folder from the page cache."""
    for path in files_in(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flip_bits(folder: Path) -> None:
    """In each file, flip a bit of a number's exponent in every 4 KiB except the first 4 KiB."""
    for path in files_in(folder):
        data = bytearray(path.read_bytes())
        for place in range(2 * 4096 - 1, len(data), 4096):
            data[place] ^= 0x40
        path.write_bytes(data)


def draw_prompts(size: Size, count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(256), k=size.blocks * engines.BLOCK + 9) for _ in range(count)]


def play(root: Path, size: Size, turns: int, count: int) -> list[Side]:
    """Fill the disks, and run a new engine for each side in each turn. The sides' order changes with each turn."""
    checkpoint = checkpoints.make("qwen3", root / "model", **size.shape)
    sides = [Side(name, root / name, checkpoint, size) for name in (NONE, OURS, FS, TIER)]
    prompts = draw_prompts(size, count)
    for side in sides[1:]:
        side.fill(prompts, draw_prompts(size, count, seed=1))
    for turn in range(turns):
        for side in sides[turn % 4 :] + sides[: turn % 4]:
            side.return_to(prompts)
        prompts = [prompts[-1], *prompts[:-1]]
    for side in sides:
        side.return_to_damage(prompts)
    return sides


def lines(sides: Sequence[Side]) -> Iterator[Line]:
    none, ours, fs, tier = sides
    yield line(f"first token sooner than computed, {OURS}", ratios(none.first_s, ours.first_s))
    yield line(f"first token sooner than computed, {FS}", ratios(none.first_s, fs.first_s))
    yield line(f"first token, {FS} over {OURS}", ratios(fs.first_s, ours.first_s))
    yield line(f"first token, {FS} over {TIER}", ratios(fs.first_s, tier.first_s))
    for side in sides:
        ms = [1e3 * each for each in side.first_s]
        yield line(f"first token, {side.name}, {min(ms):.0f} to {max(ms):.0f} ms", ms, " ms")
    for side in sides:
        yield line(f"written in all, {side.name}", [side.written / 2**20], " MiB")
        yield line(f"read in a turn, {side.name}", [each / 2**20 for each in side.read], " MiB")
        yield line(f"left on the disk, {side.name}", [side.left() / 2**20], " MiB")
    for side in sides[1:]:
        yield line(f"timed prompts not from the disk, {side.name}", [side.not_read], "", at_most=0)
        per_read = side.written / statistics.mean(side.read)
        yield line(f"written for each byte that an engine reads back, {side.name}", [per_read], "x")
        yield line(
            f"answers that differ, {side.name}", [differing(none.answers, side.answers)], "", at_most=0
        )
        wrong = differing(none.flipped, side.flipped)
        most = None if side is fs else 0
        yield line(f"answers that differ after flipped bits, {side.name}", [wrong], "", at_most=most)


def differing(some: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))
