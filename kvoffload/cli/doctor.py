"""`kvoffload doctor`: checks whether this machine is ready for an engine with the given settings.

The command starts no engine. It leaves no files behind, except for an empty object in the remote tier's bucket.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from typing import Protocol, cast

from kvoffload.checks.check import (
    FAILING,
    Check,
    Finding,
    Given,
    Setup,
    Sizes,
    Verdict,
    fail,
    ok,
    run_checks,
    unknown,
)
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.disk.tier_key import read_tier_key
from kvoffload.model.config import OffloadConfig, parse_config
from kvoffload.model.errors import ConfigError, printable

HELP = "check a machine and settings before an engine starts: ok, warning or error, with the remedy"

ENTRY_POINT_GROUP = "kvoffload.doctors"
"""The adapters' entry points. Each names a module that implements `Doctor`. Nothing else here may name an adapter."""

_DEFAULT = "vllm"
_CORRECT = "correct it; see `kvoffload settings`"
_GIVE_SIZE = "give --config host_bytes=SIZE, or the engine's own command line; see `kvoffload settings`"
_NO_SIZE = 1
"""The `host_bytes` of settings without a usable one."""
_Parse = Callable[[Mapping[str, object]], OffloadConfig]
_WORST_FIRST = tuple(reversed(Verdict))
_COLOURS = {Verdict.ERROR: "31", Verdict.WARNING: "33", Verdict.UNKNOWN: "2"}  # red, yellow, dim


class Doctor(Protocol):
    """The interface of an adapter's doctor module. Every command imports the module, so the import must be fast."""

    HELP: str

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the adapter's options to the parser."""

    def read_arguments(self, args: argparse.Namespace) -> Given:
        """Return the settings, sizes and checks that the parsed options determine.

        Raises:
            KVOffloadError: an option's value cannot be read.
        """


def find_doctors() -> tuple[dict[str, Doctor], list[Check]]:
    """Return the installed adapters' doctor modules by name, and a failing check for each module that cannot load."""
    doctors: dict[str, Doctor] = {}
    lost: list[Check] = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name):
        try:
            doctors[point.name] = cast("Doctor", point.load())
        except (ImportError, AttributeError) as error:
            finding = fail(f"the adapter's checks cannot be imported: {error}", "install kvoffload again")
            lost.append(Check(point.name, lambda *_, finding=finding: finding))
    return doctors, lost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options and the options of the installed adapters to the parser."""
    words = "kvoffload's settings: a JSON object, a file that holds one, or KEY=VALUE; may be repeated"
    parser.add_argument("--config", metavar="SETTINGS", action="append", default=[], help=words)
    doctors = find_doctors()[0]
    parser.add_argument("--engine", choices=[*doctors], default=_DEFAULT, help="whose checks to run")
    words = "the engine's own command line, after --: kvoffload doctor -- vllm serve MODEL ...; options override it"
    parser.add_argument("command_line", metavar="COMMAND", nargs="*", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit with 1 also if something is not known")
    words = "print every check, also those that passed"
    parser.add_argument("-v", "--verbose", action="store_true", help=words)
    for doctor in doctors.values():
        doctor.add_arguments(parser.add_argument_group(doctor.HELP))


def run(args: argparse.Namespace) -> int:
    """Run the checks and print the findings. Return 1 if a check fails or, with --strict, has no result.

    Raises:
        KVOffloadError: an option's value cannot be read.
    """
    findings = _findings(args)
    print(as_json(findings) if args.json else as_text(findings, verbose=args.verbose, strict=args.strict))
    failing = {Verdict.ERROR, Verdict.UNKNOWN} if args.strict else {Verdict.ERROR}
    return Exit.FAILED if failing & {one.verdict for one in findings} else Exit.OK


def _findings(args: argparse.Namespace) -> list[Finding]:
    from kvoffload.checks import memory, outputs
    from kvoffload.checks.gpus import find_gpus
    from kvoffload.checks.options import read_settings
    from kvoffload.transfer.host_memory import advise_host_bytes

    doctors, lost = find_doctors()
    given = doctors[args.engine].read_arguments(args) if args.engine in doctors else Given(None, Sizes(), ())
    settings = [read_settings(args.config, "--config")] if args.config else []
    settings += [dict(given.settings)] if given.settings is not None else []
    if len(settings) > 1:
        raise CommandError("settings are given twice: in --config and in the engine's own configuration")
    sizes = given.sizes
    raw = settings[0] if settings else {}
    rank_bytes = sizes.device_bytes or (sizes.block_bytes or 0) * (sizes.device_blocks or 0)
    copies = sizes.ranks // sizes.sharers
    advice = advise_host_bytes(copies, copies * rank_bytes or None, raw=raw)
    speed = [memory.COPY_SPEED] if sizes.page_bytes else []
    if given.parse is None:
        ours = [*memory.CHECKS, *speed, *memory.GPUS, *outputs.CHECKS]
    else:
        ours = [*outputs.TIERS]
    parse = given.parse or partial(parse_config, ranks=sizes.ranks, advice=advice)
    about, config = _settings(parse, raw, given.unread)
    if config is None:
        ours = []
    elif config.host_bytes == _NO_SIZE:
        sized = memory.SIZED if config.host_path is None else (*memory.SIZED, memory.HOST_PATH)
        ours = [_without_size(one) if one in sized else one for one in ours]
    checks = [Check("settings", lambda *_: about), *ours, *given.checks, *lost]
    known = config or OffloadConfig(host_bytes=_NO_SIZE)
    return run_checks(checks, Setup(known, sizes, pins=bool(find_gpus().names)))


def _settings(
    parse: _Parse, raw: Mapping[str, object], unread: Finding | None
) -> tuple[Finding, OffloadConfig | None]:
    """Return a finding about the settings, and the settings without those that cannot be used.

    Args:
        parse: parses settings.
        raw: the settings.
        unread: the reason why the engine's configuration could not be read; None if it was read or not given.
    """
    try:
        config = parse(raw)
    except ConfigError as error:
        usable = _usable(parse, raw)
        if unread is not None and not raw:
            return unread, usable
        lacks_size = len(error.problems) == 1 and usable is not None and usable.host_bytes == _NO_SIZE
        return fail(str(error), _GIVE_SIZE if lacks_size else _CORRECT), usable
    try:
        read_tier_key(config.tier_key_file)
    except ConfigError as error:
        return fail(str(error), _CORRECT), config
    return ok(", ".join(f"{name} {value}" for name, value in raw.items())), config


def _usable(parse: _Parse, raw: Mapping[str, object]) -> OffloadConfig | None:
    """Return the settings without those that cannot be used; None if the rest cannot be used either."""
    used: dict[str, object] = {}
    config = None
    with suppress(ConfigError):
        config = parse({"host_bytes": _NO_SIZE})
    for name, value in [*raw.items()] * 2:  # a setting may need one that comes later
        for more in ({}, {"host_bytes": _NO_SIZE}):
            with suppress(ConfigError):
                config = parse({**more, **used, name: value})
                used[name] = value
                break
    return config


def _without_size(check: Check) -> Check:
    finding = unknown("host_bytes is not known", "set host_bytes")
    return Check(check.name, lambda *_: finding)


def worst(findings: Sequence[Finding]) -> Verdict:
    found = {one.verdict for one in findings}
    return next(verdict for verdict in _WORST_FIRST if verdict in found)


def as_json(findings: Sequence[Finding]) -> str:
    """Return the worst verdict and all findings as one JSON object."""
    plain = [
        {"check": one.check, "verdict": one.verdict, "finding": one.text, "remedy": one.remedy}
        for one in findings
    ]
    return json.dumps({"verdict": worst(findings), "findings": plain}, indent=1)


def as_text(findings: Sequence[Finding], *, verbose: bool = False, strict: bool = False) -> str:
    """Return a report: the verdict in one line, a paragraph for each problem, and one for each remedy of unknown results.

    The worst problems come first.

    Args:
        findings: the findings of all checks.
        verbose: True to write a paragraph for every check.
        strict: True to write a paragraph for each unknown result, because it makes the command fail.
    """
    by_verdict = {verdict: [one for one in findings if one.verdict is verdict] for verdict in _WORST_FIRST}
    shown = set(Verdict) if verbose else {*FAILING, Verdict.UNKNOWN} if strict else FAILING
    lines = [line for verdict in by_verdict if verdict in shown for line in _paragraphs(by_verdict[verdict])]
    if by_verdict[Verdict.UNKNOWN] and Verdict.UNKNOWN not in shown:
        lines += [_wrapped(Verdict.UNKNOWN, text) for text in _by_remedy(by_verdict[Verdict.UNKNOWN])]
    if by_verdict[Verdict.OK] and not verbose:
        passed = len(by_verdict[Verdict.OK])
        lines += ["", f"{passed} check{'s' * (passed != 1)} passed (--verbose lists them)"]
    return "\n".join([_head(by_verdict, strict=strict), "", *lines])


def _head(by_verdict: Mapping[Verdict, Sequence[Finding]], *, strict: bool) -> str:
    """Return the verdict in one line, and how many checks there are of each."""
    counts = {verdict: len(found) for verdict, found in by_verdict.items() if found}
    problems = ", ".join(f"{counts[one]} {one}{'s' * (counts[one] != 1)}" for one in counts if one in FAILING)
    passed, lacking = counts.get(Verdict.OK, 0), counts.get(Verdict.UNKNOWN, 0)
    others = [f"{lacking} need{'s' * (lacking == 1)} more input"] * bool(lacking) + [f"{passed} passed"]
    first = next(iter(counts))
    if problems or (strict and first is Verdict.UNKNOWN):
        return f"{_coloured(first)}: {', '.join(filter(None, [problems, *others]))}"
    checks = f"{passed + lacking} check{'s' * (passed + lacking != 1)}"
    return f"no problem found: of {checks}, {', '.join(others)}"


def _by_remedy(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield, for each remedy, the checks that it is for, with what is unknown and why."""
    for remedy in dict.fromkeys(finding.remedy for finding in findings):
        names: dict[str, list[str]] = {}
        for finding in findings:
            if finding.remedy == remedy:
                names.setdefault(finding.text, []).append(finding.check)
        checks = ", ".join(f"{', '.join(found)} ({text})" for text, found in names.items())
        yield checks + (remedy and f": {remedy}")


def _paragraphs(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield _wrapped(finding.verdict, f"{finding.check}: {finding.text}")
        if finding.remedy:
            yield _wrapped("", f"remedy: {finding.remedy}")


def _wrapped(head: str, text: str) -> str:
    indent = " " * (max(map(len, Verdict)) + 2)
    text = textwrap.fill(
        printable(" ".join(text.split())),
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return _coloured(head) + text[len(head) :]


def _coloured(word: str) -> str:
    if word not in _COLOURS or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return word
    return f"\x1b[{_COLOURS[Verdict(word)]}m{word}\x1b[0m"
