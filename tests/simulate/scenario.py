"""The random choices of one seed: the engine, the host, the copiers, the traffic and the faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvoffload.disk.system import PAGE
from kvoffload.engine import EngineConfig, ModelConfig
from kvoffload.engine.groups import Capacity, make_groups
from tests.simulate.copier import Odds
from tests.simulate.counting import VOCABULARY
from tests.simulate.disk import DISK_TROUBLES, DiskOdds
from tests.simulate.store import STORE_TROUBLES, StoreOdds

LONGEST = 32  # the maximum number of tokens of a request, including generated tokens
_CELL_BYTES = 8

TROUBLES: dict[str, dict[str, float]] = {
    "none": {},
    "some": {"fail": 0.05, "tear": 0.05, "explode": 0.02, "refuse": 0.02, "no_fence": 0.01, "late": 0.02},
    "many": {"fail": 0.2, "tear": 0.2, "explode": 0.1, "refuse": 0.1, "no_fence": 0.05, "late": 0.05},
    "late": {"late": 0.3},
    "hanging": {"hang": 0.05, "late": 0.05, "tear": 0.05},
}


@dataclass(frozen=True)
class Scenario:
    """The choices of one seed."""

    seed: int
    engine: EngineConfig
    odds: tuple[Odds, ...]  # the odds of each rank's copier
    conversations: int
    bases: int  # the number of prompt prefixes that conversations share
    abort: float  # the probability that a turn is aborted
    cold: float  # the probability that a client pauses before its next turn
    # The probability that the device's prefix cache is reset after such a pause, if no request uses it.
    forgets: float
    acts: tuple[str, ...]  # the acts of `Operator`, in order
    step_s: float  # the maximum duration of a step
    switch: float  # the probability that another thread runs, at each point where it could
    is_shuffled: bool  # whether callbacks that are ready together run in random order
    observers: tuple[str, ...]  # the behaviour of extra observers: "slow", "raises"
    is_logged: bool  # whether log lines are written
    has_journal: bool  # whether a journal is written, to a slow disk
    has_full_disk: bool  # whether writes of the journal sometimes fail
    disk: DiskOdds | None = None  # the odds of the disk tier; None without a disk tier
    store: StoreOdds | None = None  # the odds of the remote tier; None without a remote tier

    @property
    def timeout_s(self) -> float:
        return self.odds[0].timeout_s

    def draws(self, what: str) -> random.Random:
        """Return random numbers for this purpose, independent of the numbers for other purposes."""
        return random.Random(f"{self.seed} {what}")


def draw(seed: int) -> Scenario:
    """Return the choices of a seed.

    A new choice uses `Scenario.draws` with a name of its own. If it were drawn between others, it would change all later
    choices of each seed, and `make same` would differ everywhere.
    """
    draws = random.Random(f"{seed} scenario")
    ranks = draws.choice([1, 1, 2, 3])
    timeout_s = draws.choice([0.05, 0.3, 1.0])
    acts = _acts(draws)
    scenario = Scenario(
        seed=seed,
        engine=_engine(draws, ranks, timeout_s, acts),
        odds=_odds(draws, ranks, timeout_s),
        conversations=draws.randint(2, 9),
        bases=draws.randint(1, 3),
        abort=draws.choice([0.0, 0.1, 0.4]),
        cold=draws.choice([0.0, 0.5, 0.9]),
        forgets=draws.choice([0.0, 0.8, 0.8]),
        acts=acts,
        step_s=draws.choice([0.0, 0.001, 0.02]),
        switch=draws.choice([0.0, 0.0, 0.05, 0.3]),
        is_shuffled=draws.random() < 0.5,
        observers=tuple(name for name in ("slow", "raises") if draws.random() < 0.2),
        is_logged=draws.random() < 0.1,
        has_journal=draws.random() < 0.1,
        has_full_disk=draws.random() < 0.3,
    )
    if ranks == 2 and seed % 2:
        scenario = replace(scenario, engine=replace(scenario.engine, replicas=2))
    if seed % 4 == 1:
        scenario = _with_recurrence(scenario)
    if seed % 5 < 2:
        scenario = _with_disk(scenario)
    return _with_store(scenario) if seed % 5 in (1, 2) else scenario


def _with_disk(scenario: Scenario) -> Scenario:
    """Return the scenario with a disk tier and its faults."""
    draws = scenario.draws("disk")
    trouble = DISK_TROUBLES[draws.choice([*DISK_TROUBLES, "none", "some"])]
    usual_s = draws.choice([0.0, 0.001, 0.01, scenario.timeout_s / 3])
    settings = {
        "disk_bytes": scenario.engine.ranks * (1 + draws.choice([2, 20, 60, 60])) * PAGE,
        "disk_min_hits": draws.choice([0, 0, 1, 2]),
        "store_policy": draws.choice(["eager", "twice", "auto", "lazy"]),
        "host_bytes": draws.choice([1, 5, 15, 30, 60, 60]) * _block_bytes(scenario.engine),
    }
    often = ["restart", "restart", "restart", "disk_rots", "disk_is_gone"]
    return replace(
        scenario,
        engine=with_plugin(scenario.engine, settings),
        acts=_with_more(draws, scenario.acts, often, [0, 0, 1, 2, 4]),
        disk=DiskOdds(**trouble, usual_s=usual_s),
    )


def _with_store(scenario: Scenario) -> Scenario:
    """Return the scenario with a shared remote tier and its faults."""
    draws = scenario.draws("store")
    trouble = STORE_TROUBLES[draws.choice([*STORE_TROUBLES, "none", "some"])]
    usual_s = draws.choice([0.0, 0.001, 0.01, scenario.timeout_s / 3])
    timeout_s = scenario.timeout_s * draws.choice([0.5, 1.0, 3.0])
    settings = {
        "remote_url": "s3://simulated/engines",
        "remote_timeout_s": timeout_s,
        "remote_min_hits": draws.choice([0, 0, 0, 0, 1, 2]),
        "host_bytes": draws.choice([15, 30, 60, 60]) * _block_bytes(scenario.engine),
    }
    often = ["restart", "restart", "others_write", "others_write", "store_evicts"]
    often += ["store_dies", "store_returns", "store_restarts", "store_fills"]
    return replace(
        scenario,
        engine=with_plugin(scenario.engine, settings),
        acts=_with_more(draws, scenario.acts, often, [0, 1, 2, 4, 6]),
        store=StoreOdds(**trouble, usual_s=usual_s, timeout_s=timeout_s),
    )


def _with_more(
    draws: random.Random, acts: Sequence[str], often: Sequence[str], counts: Sequence[int]
) -> tuple[str, ...]:
    """Return the acts with more of them, drawn from `often`, at random places."""
    mixed = list(acts)
    for act in draws.choices(often, k=draws.choice(counts)):
        mixed.insert(draws.randint(0, len(mixed)), act)
    return tuple(mixed)


def with_plugin(engine: EngineConfig, settings: Mapping[str, object]) -> EngineConfig:
    """Return the configuration with these settings added to the plugin's."""
    return replace(engine, plugin_config={**engine.plugin_config, **settings})


def _engine(draws: random.Random, ranks: int, timeout_s: float, acts: tuple[str, ...]) -> EngineConfig:
    block_tokens = draws.randint(1, 4)
    shape = EngineConfig(
        model=_model(draws, block_tokens, ranks + draws.choice([0, 0, 1])),
        block_tokens=block_tokens,
        max_model_len=LONGEST,
        step_tokens=draws.choice([3, 8, 8, 16]),
        max_requests=draws.choice([1, 3, 8, 8]),
        ranks=ranks,
    )
    capacity = Capacity(make_groups(shape), shape.step_tokens, LONGEST)
    spare = draws.choice([0, 2, 4, 12, 20, 60])
    sized = replace(shape, num_blocks=capacity.pool_blocks(1) + spare)
    settings = _plugin(draws, shape, timeout_s)
    if "corrupt" in acts:
        # a sample of checksums could miss the corruption, and a token would be wrong
        settings["verify"] = "full"
    return with_plugin(sized, settings)


def _model(draws: random.Random, block_tokens: int, tensors: int) -> ModelConfig:
    kind = draws.choice(["full", "full", "sliding_window", "chunked_local"])
    local = 0 if kind == "full" else draws.randint(1, 2)
    settings: dict[str, Any] = {"attention": kind, "vocab_size": VOCABULARY, "layers": tensors * (local + 1)}
    if kind == "sliding_window":
        settings["window_tokens"] = draws.randint(1, 10)
    if kind == "chunked_local":
        settings["chunk_tokens"] = block_tokens * draws.randint(1, 3)
    if local:
        settings["local_per_full"] = local
    return ModelConfig(**settings)


def _with_recurrence(scenario: Scenario) -> Scenario:
    """Return the scenario with recurrent layers.

    The device's cache is reset more often. Otherwise, lookups would find most of the few states on the
    device.
    """
    draws, config = scenario.draws("recurrence"), scenario.engine
    local = draws.randint(1, 2)
    tensors = config.model.layers_per_group
    model = ModelConfig(
        vocab_size=VOCABULARY, layers=tensors * (local + 1), attention="recurrent", local_per_full=local
    )
    shape = replace(config, model=model, num_blocks=None)
    capacity = Capacity(make_groups(shape), shape.step_tokens, LONGEST)
    sized = replace(shape, num_blocks=capacity.pool_blocks(1) + draws.choice([0, 2, 4, 12, 20, 60]))
    engine = with_plugin(sized, {"recurrent_prefix_boundaries": draws.random() < 0.8})
    return replace(scenario, engine=engine, cold=draws.choice([0.5, 0.9]), forgets=0.9)


def _plugin(draws: random.Random, shape: EngineConfig, timeout_s: float) -> dict[str, object]:
    settings: dict[str, object] = {
        "store_policy": draws.choice(["eager", "lazy", "twice", "auto"]),
        "host_bytes": draws.choice([1, 5, 15, 30, 60, 60]) * _block_bytes(shape),
        "transfer_timeout_s": timeout_s,
        "verify": draws.choice(["off", "off", "sample", "full"]),
    }
    least = draws.choice([None, None, 0, 5, "auto"])
    return settings if least is None else {**settings, "min_load_tokens": least}


def _block_bytes(shape: EngineConfig) -> int:
    """Return a block's bytes, summed over all ranks.

    Every rank counts as many bytes as the rank with the most tensors.
    """
    most_tensors = -(-shape.model.layers_per_group // shape.ranks)
    return shape.ranks * most_tensors * shape.block_tokens * _CELL_BYTES


def _odds(draws: random.Random, ranks: int, timeout_s: float) -> tuple[Odds, ...]:
    """Return each rank's fault probabilities: the same for all ranks, or nonzero for only one."""
    trouble = draws.choice([*TROUBLES, "none", "some"])
    alone = draws.choice([None, draws.randrange(ranks)])
    in_order = draws.random() < 0.7
    usual_s = draws.choice([0.0, 0.001, 0.01, timeout_s / 2])
    found = []
    for rank in range(ranks):
        odds = TROUBLES[trouble if alone in (None, rank) else "none"]
        found.append(Odds(**odds, usual_s=usual_s, timeout_s=timeout_s, in_order=in_order))
    return tuple(found)


def _acts(draws: random.Random) -> tuple[str, ...]:
    often = ["reset", "preempt", "preempt", "preempt", "device_forgets", "new_weights"]
    acts = draws.choices(often, k=draws.choice([0, 0, 1, 3, 6]))
    if draws.random() < 0.1:
        acts += ["corrupt"] * 4
        draws.shuffle(acts)
    if draws.random() < 0.1:
        acts.insert(draws.randint(0, len(acts)), draws.choice(["rank_dies", "coroutine_dies", "break"]))
    return tuple(acts)
