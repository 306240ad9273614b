"""`kvoffload gpu-check`: what only a GPU can tell, through the driver that ships, in less than ten minutes.

It needs no engine and no torch. First every copy path carries random bytes to the device and back; then copies, submission,
pinning, captures and a stand-in for a decoding engine are measured, and last the engines that are installed. A wrong byte or a
failed check ends it. On the emulated driver it runs whole; its checks count there, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.parser import positive

if TYPE_CHECKING:
    from kvoffload.bench.gpu_lines import GpuLines
    from kvoffload.bench.lines import Line

HELP = "check copies between host and an NVIDIA GPU, and measure them against the goals"
ENGINES = "kvoffload.gpu_checks"
"""Entry points: each module's `lines(host_bytes)` yields what it finds of an engine that offloads to so much host memory."""

_METHOD = "byte equality first; then medians, copies by the device's own events against one large copy of the same bytes"
_EMULATED = "emulated"
_WORTHLESS = "EMULATED DRIVER: every figure is worthless, goals are not judged; checks count"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from kvoffload.bench.results import add_output_arguments

    parser.add_argument("--device", default="cuda:0", help="the GPU, as torch names it")
    parser.add_argument("--mib", type=positive, default=128, help="MiB of one large copy")
    parser.add_argument("--repeats", type=positive, default=9, help="repeats of each measurement")
    parser.add_argument(
        "--host-gib", type=positive, default=64, help="host memory of the engine's part, in GiB"
    )
    add_output_arguments(parser)
    parser.set_defaults(save=Path())


def run(args: argparse.Namespace) -> int:
    """Check and measure; the exit code says whether a check failed, or else a goal was missed.

    Raises:
        CommandError: there is no GPU.
    """
    from kvoffload.bench.gpu_lines import GpuLines
    from kvoffload.bench.results import give_out
    from kvoffload.model.errors import CopyError, EngineContractError
    from kvoffload.transfer.cuda_driver import NvidiaDriver

    try:
        driver = NvidiaDriver(args.device, batch_copies="on")
    except (EngineContractError, CopyError) as error:
        raise CommandError(f"there is no GPU to check: {error}") from error
    is_emulated = driver.name.startswith(_EMULATED)
    lines = GpuLines(driver, args.device, args.mib << 20, args.repeats)
    found: list[Line] = []
    method = f"{_METHOD}; {_WORTHLESS}" if is_emulated else _METHOD
    try:
        give_out(
            "gpu-check",
            args,
            method,
            _measured(lines, args.host_gib << 30, found, is_emulated=is_emulated),
            gpu=driver.name,
            cuda=driver.version,
        )
    finally:
        lines.copier.close()
    return exit_code(found)


def exit_code(found: Sequence[Line]) -> int:
    """Return the code for all verdicts together."""
    verdicts = {one.verdict for one in found}
    return Exit.FAILED if "fail" in verdicts else Exit.MISSED if "miss" in verdicts else Exit.OK


def _measured(lines: GpuLines, host_bytes: int, found: list[Line], *, is_emulated: bool) -> Iterator[Line]:
    """Yield everything and keep it in `found`; of an emulated device no figure is held against a goal."""
    for one in lines.all():
        is_figure = is_emulated and one.median is not None and not one.is_check
        found.append(replace(one, what=f"{one.what} ({_EMULATED})", is_met=None) if is_figure else one)
        yield found[-1]
    if exit_code(found) == Exit.FAILED:
        return
    for point in entry_points(group=ENGINES):
        for one in point.load().lines(host_bytes):
            found.append(one)
            yield one
