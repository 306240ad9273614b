"""Compares prompts that return after a SIGKILL of SGLang: read from our disk, by SGLang's `file` backend, or computed.

Every server is a stock SGLang on the CPU with the same model and the same host memory, which is too small for all
prompts. The first server on a folder serves all prompts. In each later turn, another server on the same folder serves
all prompts again, while the page cache has none of the folder's files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.checks.options import positive
from kvoffload.cli.exits import CommandError
from tests.bench.fs import differing, files_in, flip_bits, forget_pages
from tests.bench.lines import Line, line, ratios
from tests.bench.results import add_output_arguments, give_out

if TYPE_CHECKING:
    from tests.sglang.stock.engines import Server

OURS, FILE, NONE = "kvoffload", "file backend", "no storage"
TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk (default: this one)")
    parser.add_argument("--turns", type=positive, default=3, help="servers that return on each folder")
    parser.add_argument("--prompts", type=positive, default=6)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        import sglang  # noqa: F401
    except ImportError:
        raise CommandError("this bench needs an environment with SGLang: make bench-hicache") from None
    method = f"{args.prompts} prompts, {args.turns} servers one after the other on each folder, in turns; medians [95 % interval]"
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        found = lines(play(Path(root), args.turns, args.prompts))
        return give_out("hicache", args, method, found, "sglang")


@dataclass
class Side:
    """One side of the comparison: a storage backend or none, its folder, and its results."""

    name: str
    folder: Path
    model: Path
    disk_bytes: int
    first_s: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    written: int = 0
    left: int = 0
    flipped: list[tuple[int, ...]] = field(default_factory=list)
    """The answers of a server on a damaged folder."""

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        with self._living() as server:
            for prompt in prompts:
                server.generate(prompt, TOKENS)

    def return_to(self, prompts: Sequence[Sequence[int]]) -> None:
        forget_pages(self.folder)
        with self._living() as server:
            before = moved(server, "read_bytes")
            for prompt in prompts:
                answer = server.generate(prompt, TOKENS)
                self.first_s.append(answer.first_s)
                self.answers.append(answer.tokens)
                self.stored.append(answer.stored)
            self.read.append(moved(server, "read_bytes") - before)
        self.left = sum(path.stat().st_blocks * 512 for path in files_in(self.folder))

    def return_to_damage(self, prompts: Sequence[Sequence[int]]) -> None:
        """Flip bits in the folder's files, and record the answers of a new server, whose writes are not counted."""
        flip_bits(self.folder)
        written = self.written
        with self._living() as server:
            self.flipped = [server.generate(prompt, TOKENS).tokens for prompt in prompts]
        self.written = written

    @contextmanager
    def _living(self) -> Iterator[Server]:
        """Run a server during the `with` block, wait until all pages are written, and kill the server."""
        from tests.sglang.stock.demo import OPTIONS, warm_up
        from tests.sglang.stock.engines import PAGE, serving

        options: dict[str, Any] = {**OPTIONS}
        environment: Mapping[str, str] = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.folder)}
        storage = None
        if self.name == OURS:
            storage = {"disk_path": str(self.folder), "disk_bytes": self.disk_bytes}
        if self.name == FILE:
            options["hicache_storage_backend"] = "file"
            options["hicache_storage_backend_extra_config"] = json.dumps({"prefetch_threshold": PAGE})
        log = self.model.parent / f"{self.name}.log"
        with serving(self.model, log, storage=storage, environment=environment, **options) as server:
            before = moved(server, "write_bytes")
            warm_up(server, has_tiers=self.name == OURS)
            yield server
            server.flush()
            self.written += moved(server, "write_bytes") - before
            server.kill()


def moved(server: Server, which: str) -> int:
    """Return the bytes that a server's processes have read from disks or written to disks.

    Args:
        server: the server.
        which: "read_bytes" or "write_bytes".
    """
    total = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # raised if the process has ended
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == server.process.pid:
                counts = dict(each.split(": ") for each in (entry / "io").read_text().splitlines())
                total += int(counts[which])
    return total


def play(root: Path, turns: int, count: int) -> list[Side]:
    """Fill the disks, and run a new server for each side in each turn. The sides' order changes with each turn."""
    from tests.sglang.stock import demo
    from tests.vllm.stock import checkpoints

    model = checkpoints.make("qwen3", root / "model", **checkpoints.LARGER)
    disk_bytes = 2 * count * demo.PROMPT_BYTES
    sides = [Side(name, root / name, model, disk_bytes) for name in (NONE, OURS, FILE)]
    prompts = demo.draw_prompts(count)
    for side in sides[1:]:
        side.fill(prompts)
    for turn in range(turns):
        for side in sides[turn % 3 :] + sides[: turn % 3]:
            side.return_to(prompts)
    for side in sides:
        side.return_to_damage(prompts)
    return sides


def lines(sides: Sequence[Side]) -> Iterator[Line]:
    none, ours, file = sides
    yield line(f"first token sooner than computed, {OURS}", ratios(none.first_s, ours.first_s))
    yield line(f"first token sooner than computed, {FILE}", ratios(none.first_s, file.first_s))
    yield line(f"first token, {FILE} over {OURS}", ratios(file.first_s, ours.first_s))
    for side in sides:
        ms = [1e3 * each for each in side.first_s]
        yield line(f"first token, {side.name}, {min(ms):.0f} to {max(ms):.0f} ms", ms, " ms")
    for side in sides[1:]:
        yield line(f"tokens of a prompt from storage, {side.name}", side.stored, "")
        yield line(f"written in all, {side.name}", [side.written / 2**20], " MiB")
        yield line(f"read in a turn, {side.name}", [each / 2**20 for each in side.read], " MiB")
        yield line(f"left on the disk, {side.name}", [side.left / 2**20], " MiB")
        per_read = side.written / max(statistics.mean(side.read), 1)
        yield line(f"written for each byte that a server reads back, {side.name}", [per_read], "x")
        yield line(
            f"answers that differ, {side.name}", [differing(none.answers, side.answers)], "", at_most=0
        )
        wrong = differing(none.flipped, side.flipped)
        most = 0 if side is ours else None
        yield line(f"answers that differ after flipped bits, {side.name}", [wrong], "", at_most=most)
