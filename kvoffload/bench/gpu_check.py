"""`kvoffload gpu-check`: what only a GPU can tell, through the driver that ships, in a few minutes.

It needs no engine and no torch. First every copy path carries random bytes to the device and back; then copies, submission,
pinning and captures are measured. On the emulated driver it runs whole, and its figures mean nothing.
"""

from __future__ import annotations

import argparse

from kvoffload.cli.exits import CommandError

HELP = "check copies between host and an NVIDIA GPU, and measure them against the goals"
_METHOD = "byte equality first; then medians, copies by the device's own events against one large copy of the same bytes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from kvoffload.bench.results import add_output_arguments

    parser.add_argument("--device", default="cuda:0", help="the GPU, as torch names it")
    parser.add_argument("--mib", type=int, default=128, help="MiB of one large copy")
    parser.add_argument("--repeats", type=int, default=9, help="repeats of each measurement")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check and measure.

    Raises:
        CommandError: there is no GPU, or a copy has moved wrong bytes.
    """
    from kvoffload.bench.gpu_lines import GpuLines
    from kvoffload.bench.results import give_out
    from kvoffload.model.errors import CopyError, EngineContractError
    from kvoffload.transfer.cuda_driver import NvidiaDriver

    if args.mib < 1 or args.repeats < 1:
        raise CommandError("--mib and --repeats must be at least 1")
    try:
        driver = NvidiaDriver(args.device, batch_copies="on")
    except (EngineContractError, CopyError) as error:
        raise CommandError(f"there is no GPU to check: {error}") from error
    lines = GpuLines(driver, args.device, args.mib << 20, args.repeats)
    try:
        return give_out("gpu-check", args, f"{driver.name}: {_METHOD}", lines.all())
    finally:
        lines.copier.close()
