"""`make soak`: an hour of simulated time on the reference engine, then minutes of real time on a stock vLLM.

The vLLM half needs the environment with vLLM. Each half runs in its own process, so that its memory
does not affect what the other half measures.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.soak.growth import Growth, Reading, growth_of, table

_WARM_UP = 0.25  # the share of a run during which pools and buffers of a fixed size are still filling
_READINGS = 60
_PYTHON_WITH_VLLM = Path(__file__).parents[2] / ".venv" / "vllm" / "bin" / "python"

Half = Callable[[float, float, Callable[[str], object]], tuple[list[Reading], str]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--reference-minutes", type=float, default=60, help="of virtual time (60)")
    parser.add_argument("--vllm-minutes", type=float, default=10, help="of real time (10); 0 leaves it out")
    parser.add_argument("--half", choices=("reference", "vllm"), help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.half is not None:
        # Some copies fail on purpose. The logs of these failures would hide the table.
        logging.disable(logging.ERROR)
        minutes = asked.reference_minutes if asked.half == "reference" else asked.vllm_minutes
        return run(_reference if asked.half == "reference" else _vllm, minutes)
    halves = [("reference", sys.executable, asked.reference_minutes)]
    halves += [("vllm", str(_PYTHON_WITH_VLLM), asked.vllm_minutes)]
    codes = [_process(name, python, minutes) for name, python, minutes in halves if minutes]
    passed = codes.count(0)
    print(f"soak: {passed} of {len(codes)} passed")
    return int(passed < len(codes))


def run(half: Half, minutes: float) -> int:
    """Run one half of the soak, and print its table and a summary; return 1 if anything grew."""
    readings, words = half(minutes * 60, minutes * 60 / _READINGS, _progress)
    found = growth_of(readings[round(len(readings) * _WARM_UP) :])
    _progress("")
    print(f"{words}; {len(readings)} readings, the first quarter of them warm-up")
    print(table(found))
    print(f"soak {summary(found)}", flush=True)
    return int(not all(one.passed for one in found))


def summary(found: Sequence[Growth]) -> str:
    grown = [f"{one.name} {one.share:.2%}" for one in found if not one.passed]
    if grown:
        return f"FAILED: {', '.join(grown)}"
    worst = max(found, key=lambda one: one.share)
    return f"passed: {len(found)} numbers, none grew by more than {worst.share:.2%} ({worst.name})"


def _process(name: str, python: str, minutes: float) -> int:
    command = [python, "-m", "tests.soak", "--half", name, f"--{name}-minutes", str(minutes)]
    return subprocess.run(command, check=False).returncode


def _reference(
    seconds: float, apart_s: float, reported: Callable[[str], object]
) -> tuple[list[Reading], str]:
    import torch

    from tests.soak.on_reference import soak

    torch.set_num_threads(1)
    return soak(seconds, apart_s, reported)


def _vllm(seconds: float, apart_s: float, reported: Callable[[str], object]) -> tuple[list[Reading], str]:
    from tests.soak.on_vllm import soak

    with tempfile.TemporaryDirectory() as folder:
        return soak(seconds, apart_s, Path(folder), reported)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
