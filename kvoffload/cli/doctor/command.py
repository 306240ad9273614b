"""`kvoffload doctor`: is this machine, with these settings, ready for an engine? It starts nothing and leaves nothing."""

from __future__ import annotations

import argparse

from kvoffload.cli import signals
from kvoffload.cli.doctor.adapters import find_adapters
from kvoffload.cli.exits import Exit
from kvoffload.cli.parser import positive

HELP = "check a machine and settings before an engine starts: go, warning or no-go, with the remedy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options, and those of the adapters."""
    from kvoffload.cli.doctor.given import size

    add = parser.add_argument
    add(
        "--config",
        metavar="JSON",
        action="append",
        default=[],
        help="kvoffload's settings: a JSON object, a file that holds one, or KEY=VALUE; may be repeated",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--strict", action="store_true", help="exit with 1 also if something is not known")
    add("--verbose", action="store_true", help="also list the checks that passed")
    sizes = parser.add_argument_group(
        "sizes", "as the engine reports them at its start; they come before those of --model"
    )
    sizes.add_argument("--ranks", metavar="N", type=positive, help="workers of the engine on this machine")
    sizes.add_argument("--device-blocks", metavar="N", type=positive, help="blocks of the device's KV cache")
    sizes.add_argument(
        "--block-bytes",
        metavar="BYTES",
        type=size,
        help="one rank's bytes of one block, in all layers together",
    )
    sizes.add_argument(
        "--page-bytes", metavar="BYTES", type=size, help="one rank's bytes of one block, in one layer"
    )
    sizes.add_argument("--block-tokens", metavar="N", type=positive, help="tokens of a block")
    sizes.add_argument(
        "--replicas",
        metavar="N",
        type=positive,
        default=1,
        help="data-parallel engines on this machine; each has a disk_bytes of its own (default: 1)",
    )
    for doctor in find_adapters().doctors.values():
        doctor.add_arguments(parser.add_argument_group(doctor.HELP))


def run(args: argparse.Namespace) -> int:
    """Check, print, and return 1 if something is a no-go.

    Raises:
        KVOffloadError: what was given cannot be read.
    """
    with signals.importing():
        from kvoffload.checks import disk, memory, numa, outputs, pools, remote, software
        from kvoffload.checks.check import Verdict, run_checks
        from kvoffload.checks.machine import Machine
        from kvoffload.cli.doctor.given import settings_of, setup_of
        from kvoffload.cli.doctor.output import as_json, as_text

        adapters = find_adapters()
    doctors = list(adapters.doctors.values())
    setup, settings = setup_of(settings_of(args.config, doctors, args), doctors, args)
    checks = [
        settings,
        *memory.CHECKS,
        memory.SHARED_MEMORY,
        *numa.CHECKS,
        *software.CHECKS,
        *pools.CHECKS,
        *disk.CHECKS,
        *outputs.CHECKS,
        *remote.CHECKS,
        *(check for doctor in doctors for check in doctor.checks(args)),
        *adapters.lost_checks(),
    ]
    answers = run_checks(checks, setup, Machine())
    print(as_json(answers) if args.json else as_text(answers, verbose=args.verbose))
    failing = {Verdict.NO_GO, Verdict.UNKNOWN} if args.strict else {Verdict.NO_GO}
    return Exit.FAILED if failing & {answer.finding.verdict for answer in answers} else Exit.OK
