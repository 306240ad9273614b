"""Runs models that have recurrent layers, with every setting that affects states, and writes a table of the
results.

One engine runs per model and setting. It runs all of `scenes.py`, and its answers are compared with those of an
engine without prefix caching and without a connector. As a control, loaded states are zeroed, which must change
the answers.

    python -m tests.vllm.recurrent_matrix [MODEL...]
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from tests.tooling.scripts import load_script
from tests.vllm.engine_rig import Reported, plain
from tests.vllm.scenes import BLOCK_TOKENS, SCENES, Stage, failed, reloaded, requests_for, stage
from tests.vllm.stock import checkpoints

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "plugins" / "kvoffload_vllm" / "README.md"
SEED = 11
HOST = 512
HEAD = (
    "model",
    "settings",
    "answers",
    "different",
    "largest error",
    "tokens found",
    "states loaded",
    "zeroed",
)


def settings(kind: checkpoints.Kind) -> Iterator[tuple[str, int, dict[str, Any], dict[str, Any]]]:
    """Yield each setting's name, the number of host blocks, the connector's settings and the engine's
    options.
    """
    block = BLOCK_TOKENS[kind]
    yield "eager", HOST, {}, {}
    yield "lazy", HOST, {"store_policy": "lazy"}, {}
    yield "12 blocks on the host", 12, {}, {}
    yield "48 blocks on the host", 48, {}, {}
    yield "no boundaries", HOST, {"recurrent_prefix_boundaries": False}, {}
    yield "states every 2 blocks", HOST, {}, {"prefix_cache_retention_interval": 2 * block}
    yield "all states", HOST, {}, {"prefix_cache_retention_interval": None}
    if kind != "lfm2":  # with this option, LFM2's answers on vLLM 0.32 differ even without a connector
        yield "hashes of half blocks", HOST, {}, {"prefix_match_unit": block // 2}
    yield "two steps in flight", HOST, {}, {"two_steps": True}


def rows(kind: checkpoints.Kind, folder: Path) -> list[list[str]]:
    """Run a model in every setting; print and return a row for each."""
    table = []
    asked = requests_for(kind, SEED)
    with plain(kind, folder, num_gpu_blocks_override=512, enable_prefix_caching=False) as rig:
        expected = rig.run(asked)
    for name, host, extra, options in settings(kind):
        chosen = {"asked": asked, "expected": expected, "extra": extra, **options}
        with stage(kind, folder, host, **chosen) as on:
            table.append([kind, name, *map(str, _play(on))])
        sys.stderr.write(f"{' | '.join(table[-1])}\n")
    return table


def _play(on: Stage) -> tuple[object, ...]:
    before, answers, different, error, found = on.rig.counts, 0, 0, 0.0, 0
    for scene in (*SCENES, failed):
        on.rig.forget()
        reported = scene(on)
        on.rig.check_clean()
        answers, different = answers + len(reported), different + len(on.different(reported))
        error = max(error, *_errors(reported, on.expected))
        found += sum(one.cached for one in reported.values())
    loaded = on.rig.counts.minus(before).count("kvoffload_state_blocks_total", "load")
    on.rig.forget()
    on.copier.lies = True
    zeroed = len(on.different(reloaded(on)))
    return answers, different, f"{error:.0e}", f"{found:,}", loaded, zeroed


def _errors(reported: Mapping[str, Reported], expected: Mapping[str, Reported]) -> Iterator[float]:
    for name, one in reported.items():
        pairs = zip(one.logprobs, expected[name].logprobs, strict=True)
        yield max(abs(left - right) for left, right in pairs)


def render(table: list[list[str]]) -> str:
    """Return a Markdown table with one row per model, and the date."""
    lines = [
        HEAD,
        ["---"] * len(HEAD),
        *(_summed(model, table) for model in dict.fromkeys(row[0] for row in table)),
    ]
    when = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{body}\n\nvLLM 0.32.0 on a CPU, {when}, seed {SEED}."


def _summed(model: str, table: list[list[str]]) -> list[str]:
    """Return a row with the sums over a model's settings, and the largest error."""
    _, settings, answers, different, errors, found, loaded, zeroed = zip(
        *(row for row in table if row[0] == model), strict=True
    )
    sums = [_sum(column) for column in (answers, different, found, loaded, zeroed)]
    return [model, str(len(settings)), *sums[:2], max(errors, key=float), *sums[2:]]


def _sum(cells: Iterable[str]) -> str:
    return f"{sum(int(cell.replace(',', '')) for cell in cells):,}"


def main() -> int:
    parser = argparse.ArgumentParser(description="run models with recurrent layers in every setting")
    parser.add_argument("models", nargs="*", help="only these models; the table is not written")
    asked = parser.parse_args()
    table: list[list[str]] = []
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="kvoffload-recurrent-") as folder,
        # Run each model in a separate process, so that its memory is freed.
        ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool,
    ):
        for rows_of_model in pool.map(rows, asked.models or checkpoints.RECURRENT, repeat(Path(folder))):
            table += rows_of_model
    sys.stdout.write(f"\n{render(table)}\n")
    if not asked.models:
        text: str = load_script("readme").filled(PAGE.read_text(encoding="utf-8"), "recurrent", render(table))
        PAGE.write_text(text, encoding="utf-8")
    return int(any(row[3] != "0" for row in table))


if __name__ == "__main__":
    sys.exit(main())
