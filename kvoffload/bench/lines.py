"""What the table of bench/README.md says of copies and whole engines: what was measured, what came of it, the target, and whether it is met."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from kvoffload.bench.spread import Spread

Told: TypeAlias = Mapping[str, Any]
Line: TypeAlias = tuple[str, str, str, bool | None]

_COPY_GOALS = {4: 0.6, 64: 0.9, 256: 0.9, 2048: 0.9}
"""By KiB of a page: speed over that of one large copy."""


HOOKS_TARGET = 0.3
"""Of the peer's time, with many running requests."""
_MANY = 128
QUEUE_TARGET = 1.1
"""Of a step with few waiting."""
CONVOY_TARGET = 1.1
"""Of the bytes of one load."""
PHASES = {
    "decode": "each decoding step",
    "prefill": "each step that admits requests",
    "all": "the whole workload",
}


def hooks(told: Told) -> Iterator[Line]:
    """Yield the lines of `bench hooks`, where the peer ran too: medians [range] of its repeats."""
    for case in told["cases"]:
        if ratios := sorted(case["ratios"]):
            running = case["running"]
            what = f"scheduler's hooks over the peer's, {PHASES[case['phase']]}, {running} running, {case['attention']}"
            middle = statistics.median(ratios)
            found = f"{middle:.2f}x [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
            has_target = running >= _MANY and case["phase"] != "prefill"
            yield (
                what,
                found,
                f"at most {HOOKS_TARGET}x" * has_target,
                middle <= HOOKS_TARGET if has_target else None,
            )


def queue(told: Told) -> Iterator[Line]:
    """Yield the lines of `bench queue`."""
    for case in told["cases"]:
        growth, is_ours = case["growth"], case["connector"] == "kvoffload"
        whose = "" if is_ours else f"; {case['connector']}, for comparison"
        what = f"scheduler's hooks per step with {case['waiting']:,} requests that wait, over {told['few']}{whose}"
        target, is_met = (
            (f"at most {QUEUE_TARGET}x", growth["median"] <= QUEUE_TARGET) if is_ours else ("", None)
        )
        yield what, _times(growth), target, is_met


def engine(told: Told) -> Iterator[Line]:
    """Yield the lines of `bench engine`."""
    over = told["no_reuse"]["with_over_without"]
    what = "throughput on prompts that never repeat, reference engine, with over without"
    yield what, _times(over, 3), "at least 0.99x", over["median"] >= 0.99
    steps = told["step_time"]
    idle, pending = steps["nothing_pending"], steps["copies_pending"]
    # 1.00 is met where the measurement cannot tell it from 1.00.
    is_met = idle["low"] is None or idle["low"] <= 1.0
    yield "step bound by Python, nothing pending, over no threads", _times(idle, 3), "1.00x", is_met
    wake_ups = steps["wake_ups_with_nothing_pending"]
    yield f"wake-ups in {steps['steps']:,} steps with nothing pending", str(wake_ups), "0", wake_ups == 0
    yield (
        "step bound by Python, copies pending, over no threads",
        _times(pending, 3),
        "at most 1.05x",
        pending["median"] <= 1.05,
    )
    turns = told["returning_turns"]
    what = f"first token of returning turns, working set {turns['working_set_to_cache']:.0f} times the device's cache: "
    sooner = turns["times_sooner"]
    yield what + "sooner than recomputed", _times(sooner, 1), "at least 3x", sooner["median"] >= 3


def serve(told: Told) -> Iterator[Line]:
    """Yield the lines of `bench serve`."""
    vllm = f"vLLM {told['machine']['vllm']}"
    for name, over in told["no_reuse"]["over_plain"].items():
        what = f"throughput on prompts that never repeat, {vllm}, {_CONNECTORS[name]} over none"
        target, is_met = ("at least 0.99x", over["median"] >= 0.99) if name == "kvoffload" else ("", None)
        yield what, _times(over, 3), target, is_met
    turns = told["returning_turns"]
    first = f"first token of returning turns, {vllm}, working set {turns['working_set_to_cache']:.0f} times the cache"
    for name, sooner in turns["times_sooner_than_recomputing"].items():
        target, is_met = ("at least 3x", sooner["median"] >= 3) if name == "kvoffload" else ("", None)
        yield f"{first}: {_CONNECTORS[name]}, sooner than recomputed", _times(sooner, 1), target, is_met
    beside = turns["times_sooner_than_peer"]
    if beside is not None:
        yield (
            f"{first}: sooner than vLLM's own connector",
            _times(beside),
            "at least 1x",
            beside["median"] >= 1,
        )


def copy(told: Told) -> Iterator[Line]:
    """Yield the lines of `bench copy`: for each page and number of threads the slowest way, against its goal."""
    cases: dict[tuple[int, int], list[Told]] = {}
    for case in (case for case in told["cases"] if not case.get("path")):  # as a user's copies go
        cases.setdefault((case["page_kib"], case["threads"]), []).append(case)
    for (page_kib, threads), found in sorted(cases.items(), key=lambda one: (one[0][1], one[0][0])):
        ways = ", ".join(case["way"] for case in found)
        shown = "; ".join(_times(case["of_one_piece"]) for case in found)
        plural = "s" if threads > 1 else ""
        goal = _COPY_GOALS.get(page_kib)
        slowest = min(case["of_one_piece"]["median"] for case in found)
        yield (
            f"copies of scattered pages of {page_kib} KiB over one large copy, {threads} thread{plural}: {ways}",
            shown,
            "" if goal is None else f"at least {goal:g}x",
            None if goal is None else slowest >= goal,
        )
    load = told["load_behind_stores"]
    what = f"a load of {load['load_mib']} MiB while {load['queued_mib']} MiB of stores are queued, over the load alone"
    yield what, _times(load["ratio"]), "at most 1.2x", load["ratio"]["median"] <= 1.2
    one = told["submission"]
    merged, hook = one["merge_and_submit_us_a_block"], one["hook_us_a_block"]
    yield (
        f"submitting {one['adjacent_blocks']:,} adjacent blocks: merged and submitted; in the hook, the job taken in",
        f"{merged['median']:.2f}; {hook['median']:.2f} us a block",
        "at most 0.05 us",
        merged["median"] <= 0.05,
    )


_CONNECTORS = {"kvoffload": "with", "peer": "with vLLM's own connector"}


def _times(plain: Told, places: int = 2) -> str:
    return Spread(**plain).text(f"{{:.{places}f}}", "x")
