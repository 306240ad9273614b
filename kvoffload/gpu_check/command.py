"""`kvoffload gpu-check`: checks copies between host and one NVIDIA GPU, and measures them.

The command needs neither an engine nor torch. First it compares copied bytes, then it measures speeds, then it runs the
checks that may hang or crash, and last the checks of installed engines. Each part runs in a separate process. Only a
wrong byte ends the whole command. With the emulated driver all parts run, but times and speeds get no verdict.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import kvoffload
from kvoffload.checks.options import positive, size
from kvoffload.cli.exits import CommandError, Exit, say
from kvoffload.cli.partial_file import STDOUT, written
from kvoffload.telemetry.provenance import describe_machine

if TYPE_CHECKING:
    from kvoffload.gpu_check.parts import CheckPart, Line, Options

HELP = "check copies between host and an NVIDIA GPU, and measure them against the goals"
ENGINES = "kvoffload.gpu_checks"
"""The entry points of modules with a function `lines(options)` that checks an engine. They run last, sorted by name."""

_HERE = "kvoffload.gpu_check"
_ENGINE_S = 420.0
_EMULATED = "emulated"
_WORDS = {
    Exit.OK: "passed",
    Exit.MISSED: "passed, but a goal was missed or a part failed (see `miss`)",
    Exit.FAILED: "failed (see `fail`): do not offload on this machine",
}


def parts() -> dict[str, CheckPart]:
    """Return all parts by name, in the order in which they run. The parts of installed engines are the last."""
    from kvoffload.gpu_check.parts import CheckPart

    copies, latencies, hazards = f"{_HERE}.copies", f"{_HERE}.latencies", f"{_HERE}.hazards"
    own = {
        "device": CheckPart("GPU", f"{copies}:device", 60, is_check=True),
        "bytes": CheckPart("wrong bytes", f"{copies}:compared", 180, is_check=True),
        "speeds": CheckPart("speeds", f"{copies}:speeds", 120),
        "latencies": CheckPart("latencies", f"{latencies}:latencies", 90),
        "profile": CheckPart("how the page kernel is best used", f"{copies}:profile", 180),
        "captures": CheckPart("calls during a capture", f"{hazards}:captures", 90),
        "depth": CheckPart("depth of a stream", f"{hazards}:depth", 90),
        "exits": CheckPart("exit codes", f"{hazards}:exits", 120),
        "segments": CheckPart("expandable segments", f"{hazards}:segments", 90),
    }
    engines = {
        point.name: CheckPart(point.name, f"{point.value}:lines", _ENGINE_S, is_check=True)
        for point in entry_points(group=ENGINES)
    }
    return own | dict(sorted(engines.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda:0", help="the GPU, as torch names it")
    add("--copy-bytes", metavar="BYTES", type=size, default="256MiB", help="a large copy, in whole MiB")
    add("--repeats", metavar="N", type=positive, default=7, help="repeats of each measurement")
    add("--host-bytes", metavar="BYTES", type=size, default="64GiB", help="host memory of an engine")
    add("--only", nargs="+", metavar="PART", help=f"run these parts only: {', '.join(parts())}")
    add("--json", action="store_true", help="print each line as a JSON object")
    words = "keeps all lines; what the parts print goes beside it, into a file that ends in .log"
    add("-o", "--output", metavar="FILE", type=Path, default=Path("gpu-check.json"), help=words)


def run(args: argparse.Namespace) -> int:
    """Run the chosen parts, and print their lines and the verdict. Return the exit code.

    The exit code says whether a check has failed or, if not, whether a goal was missed.

    Raises:
        CommandError: there is no GPU, a part is unknown, or the output is not a file or ends in `.log`.
        OutputError: the result cannot be written.
    """
    from kvoffload.gpu_check.parts import Line, Options

    if args.output == STDOUT:
        raise CommandError("--output takes a file; --json prints every line as JSON")
    options = Options(args.device, max(args.copy_bytes >> 20, 1) << 20, args.repeats, args.host_bytes)
    chosen = _chosen(args.only)
    log = args.output.with_suffix(".log")
    if log == args.output:
        raise CommandError("--output must not end in .log, the ending of the file for what the parts print")
    about, found = _about(options), list[Line]()
    first, *others = chosen
    # The log gets its name when there is a GPU, so that a refusal leaves an earlier run's log as it is.
    with written(log) as printed:
        device = list(_announced(first, options, Path(printed.name)))
        if device[0].is_met is False:
            raise CommandError(f"there is no GPU to check: {device[0].words}")
    for line in chain(device, (line for part in others for line in _announced(part, options, log))):
        found.append(_judged(line, found))
        # Write the file before printing, so that it contains every line that was printed.
        with written(args.output) as file:
            json.dump({**about, "lines": [_plain(one) for one in found]}, file, indent=1)
        print(json.dumps(_plain(found[-1])) if args.json else found[-1].text, flush=True)
        if line.is_last:
            break
    code = exit_code(found)
    say(f"{_WORDS[code]}; all {len(found)} lines are in {args.output}")
    return code


def exit_code(lines: Iterable[Line]) -> Exit:
    """Return the exit code that follows from all lines together."""
    verdicts = {line.verdict for line in lines}
    return Exit.FAILED if "fail" in verdicts else Exit.MISSED if "miss" in verdicts else Exit.OK


def _announced(part: CheckPart, options: Options, log: Path) -> Iterator[Line]:
    """Say which part runs, because its first line may take minutes; then run it and yield its lines."""
    from kvoffload.gpu_check.parts import lines_of

    say(f"checking {part.what}, at most {part.limit_s:g} s")
    yield from lines_of(part, options, log)


def _judged(line: Line, before: Sequence[Line]) -> Line:
    """Return `line`, without its verdict if the line has a time or a speed of the emulated driver.

    The first line in `before` names the driver.
    """
    if before and before[0].words.startswith(_EMULATED) and line.unit:
        return replace(line, what=f"{line.what} ({_EMULATED})", is_met=None)
    return line


def _chosen(names: Sequence[str] | None) -> list[CheckPart]:
    """Return the parts to run. The first part always runs.

    Raises:
        CommandError: a name is unknown.
    """
    known = parts()
    if unknown := set(names or ()) - known.keys():
        raise CommandError(f"--only: unknown part {min(unknown)!r}; choose from {', '.join(known)}")
    first, *others = known
    return [known[first], *(known[name] for name in others if names is None or name in names)]


def _about(options: Options) -> dict[str, object]:
    """Return the facts that determine the numbers, except the GPU, which the first line names."""
    return {
        "kvoffload": kvoffload.__version__,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "options": asdict(options),
    }


def _plain(line: Line) -> dict[str, object]:
    """Return a line's fields for JSON. Empty fields are left out, and numbers are rounded to five digits."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in asdict(line).items()
        if value not in (None, "") and value is not False
    }
