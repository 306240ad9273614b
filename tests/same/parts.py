"""Describes behaviour in rows of text that are the same on every machine and in every run."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kvoffload.model.ids import GroupId
from tests.bench.trace import CoreEngine, Tiers, play
from tests.bench.trace_file import Prompt, Trace
from tests.core import test_costs
from tests.explore.search import explore
from tests.explore.worlds import WORLDS
from tests.keys import block_key
from tests.operations import calls
from tests.runtime import test_hook_calls
from tests.simulate.simulation import simulate

_BLOCK_TOKENS = 512
Rows = Mapping[str, object]

SEEDS = range(40)
TIERS = (
    Tiers("host", 40),
    Tiers("host, disk", 40, 200),
    Tiers("host, store after a hit", 40, 0, 1),
    Tiers("host, disk, store of all", 40, 200, 0),
)


# -- exploration --------------------------------------------------------------------------------------------------


def explored(states: int) -> Rows:
    """Explore each world up to this many states; list its numbers of states and transitions, and its depth."""
    # Each world runs in its own process, so that the memory of its states is freed at the end.
    with multiprocessing.Pool(maxtasksperchild=1) as pool:
        found = pool.map(partial(_explored, states), WORLDS, chunksize=1)
    return dict(zip(WORLDS, found, strict=True))


def _explored(states: int, world: str) -> str:
    seen = explore(WORLDS[world], states=states)
    if seen.violation is not None:
        return f"breaks a rule: {seen.violation.problem}"
    return f"{seen.states} states, {seen.transitions} transitions, depth {seen.depth}"


# -- calls --------------------------------------------------------------------------------------------------------


def hooks() -> Rows:
    """Count the Python and C function calls of each hook, and the calls that the core makes for each fact."""
    test_hook_calls.counted()  # the first count in a process includes extra calls, so it is discarded
    rows = test_hook_calls.counted()
    with tempfile.TemporaryDirectory() as folder:
        on_disk = test_hook_calls.counted(portal=True, disk=Path(folder))
    rows |= {f"{hook}, with a disk": count for hook, count in on_disk.items()}
    for policy in ("eager", "lazy"):
        scenes = test_costs.scenes(*test_costs.crowded(10, policy))
        rows |= {f"core, {policy}: {scene}": calls(act) for scene, act in scenes.items()}
    return rows


# -- tokens -------------------------------------------------------------------------------------------------------


def trace() -> Rows:
    """Play the same conversations with each set of tiers; list each run's counts."""
    conversations = Trace(_BLOCK_TOKENS, _conversations())
    return {
        f"{tiers.name}, engines: {engines}": _listed(play(CoreEngine, tiers, conversations, engines))
        for tiers in TIERS
        for engines in (1, 3)
    }


def _conversations() -> list[Prompt]:
    """Generate random prompts of 12 conversations that all begin with the same block."""
    draws, prompts = random.Random(1), list[Prompt]()
    talks = [[0] for _ in range(12)]
    for number in range(1, 301):
        talk = draws.choice(talks)
        talk += [2 * number, 2 * number + 1][: draws.randint(1, 2)]
        if len(talk) > 9:
            del talk[1:]
        tokens = _BLOCK_TOKENS * len(talk) - draws.randrange(_BLOCK_TOKENS)
        keys = tuple(block_key(b"%032x" % block, GroupId(0)) for block in talk[: tokens // _BLOCK_TOKENS])
        prompts.append(Prompt(number / 10, tokens, keys))
    return prompts


def simulated() -> Rows:
    """Simulate several seeds; list what happened in each run, and the sums of the engines' counters."""
    rows, totals = dict[str, object](), Counter[str]()
    for seed in SEEDS:
        world = simulate(seed)
        counts = world.offload.counters.snapshot().counts
        for name, series in counts.items():
            totals.update({f"{name} {' '.join(labels)}": count for labels, count in series.items()})
        numbers = {
            "requests": world.requests,
            "steps": world.steps,
            "deaths": world.life,
            **world.copies_below,
        }
        tokens = {
            f"tokens {' '.join(labels)}": count
            for labels, count in counts["kvoffload_lookup_tokens_total"].items()
        }
        rows[f"seed {seed}"] = _listed({**numbers, **tokens})
    return rows | dict(sorted(totals.items()))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()) if count)
