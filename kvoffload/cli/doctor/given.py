"""What was given on the command line, as a setup."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from kvoffload.checks.check import Check, Finding, Setup, concluded, go, no_go
from kvoffload.checks.json_option import read_object
from kvoffload.cli.doctor.adapters import Doctor
from kvoffload.cli.exits import CommandError
from kvoffload.model.config import OffloadConfig, parse_bytes, parse_config
from kvoffload.model.errors import ConfigError


def size(text: str) -> int:
    """Bytes, for `type=`: a number or a text such as "64KiB"."""
    return parse_bytes(int(text) if text.isdecimal() else text)


def settings_of(
    given: str | None, doctors: Sequence[Doctor], args: argparse.Namespace
) -> Mapping[str, object] | None:
    """Return the settings, None where nothing was given.

    Raises:
        KVOffloadError: they cannot be read, or were given more than once.
    """
    found: list[Mapping[str, object]] = [read_object(given, "--config")] if given is not None else []
    found += [one for doctor in doctors if (one := doctor.find_settings(args)) is not None]
    if len(found) > 1:
        raise CommandError("settings are given twice: in --config and in the engine's own configuration")
    return found[0] if found else None


def setup_of(raw: Mapping[str, object] | None, args: argparse.Namespace) -> tuple[Setup, Check]:
    """Return the setup, and the check that tells what is wrong with its settings.

    Raises:
        CommandError: the sizes contradict each other.
    """
    page, block = args.page_bytes, args.block_bytes
    if page and block and block % page:
        raise CommandError(f"--block-bytes {block} is no multiple of --page-bytes {page}")
    config, finding = _parse(raw)
    setup = Setup(
        config=config,
        ranks=args.ranks,
        device_blocks=args.device_blocks,
        page_bytes=(page,) * (block // page if block else 1) if page else (),
        block_bytes=block,
    )
    return setup, concluded("settings", finding)


def _parse(raw: Mapping[str, object] | None) -> tuple[OffloadConfig | None, Finding]:
    if raw is None:
        return OffloadConfig(), go("none are given: the defaults are checked")
    try:
        config = parse_config(raw)
    except ConfigError as error:
        return None, no_go(str(error), "change what is named; docs/configure.md lists the settings")
    return config, go(f"{len(raw)} {'is' if len(raw) == 1 else 'are'} given, all of them good")
