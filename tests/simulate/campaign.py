from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from tests.simulate.simulation import Simulation, simulate

# A seed may use this many seconds of processor time, so that an endless loop does not block the campaign.
_PATIENCE_S = 60

Play = Callable[[int], Simulation]


class Endless(BaseException):
    """Raised when a seed takes too long. Code under test catches an `Exception`, but not this error."""


@dataclass(frozen=True)
class Result:
    """The result of one seed: its error, if any, and how often each kind of event occurred."""

    seed: int
    problem: str | None = None
    trace: str = ""
    numbers: Counter[str] = field(default_factory=Counter)


def play(seed: int, simulation: Play = simulate) -> Result:
    try:
        with _patience(seed):
            world = simulation(seed)
    except (Exception, Endless) as error:
        return Result(seed, f"{type(error).__name__}: {error}", traceback.format_exc())
    return Result(seed, numbers=_numbers(world))


def play_all(seeds: Iterable[int], processes: int | None = None) -> Iterator[Result]:
    context = multiprocessing.get_context("forkserver")  # forking a process that has threads may hang
    with context.Pool(processes or os.cpu_count(), _start) as pool:
        yield from pool.imap_unordered(play, seeds, chunksize=8)


def keep_journal(seed: int, folder: Path) -> tuple[Path, Result]:
    """Run a seed again with a complete journal in `folder`; return the journal's path and the new result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{seed}.jsonl"
    path.unlink(missing_ok=True)
    return path, play(seed, lambda seed: simulate(seed, journal=path))


def _start() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C and ends this process


def _numbers(world: Simulation) -> Counter[str]:
    counts = world.offload.counters.snapshot()
    return Counter(
        steps=world.steps,
        copies=counts.total("kvoffload_transfers_total"),
        stored=counts.count("kvoffload_store_blocks_total", "stored"),
        loaded=counts.count("kvoffload_load_blocks_total", "loaded"),
        states=counts.count("kvoffload_state_blocks_total", "load"),
        boundaries=counts.count("kvoffload_prefix_boundaries_made_total"),
        requests=world.requests,
        lives=world.life,
        **world.copies_below,
    )


@contextmanager
def _patience(seed: int) -> Iterator[None]:
    def out(number: int, frame: FrameType | None) -> None:
        raise Endless(f"seed {seed} has used {_PATIENCE_S} s of processor time")

    before = signal.signal(signal.SIGVTALRM, out)
    signal.setitimer(signal.ITIMER_VIRTUAL, _PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
