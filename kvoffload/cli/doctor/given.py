"""The setup that the command line describes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from kvoffload.checks.check import Check, Finding, Setup, Sizes, concluded, go, no_go
from kvoffload.checks.json_option import read_settings
from kvoffload.cli.doctor.adapters import Doctor
from kvoffload.cli.exits import CommandError
from kvoffload.model.config import OffloadConfig, parse_bytes, parse_config
from kvoffload.model.errors import ConfigError


def size(text: str) -> int:
    """Return bytes, for `type=`, from a number or a text such as "64KiB"."""
    return parse_bytes(int(text) if text.isdecimal() else text)


def settings_of(
    given: Sequence[str], doctors: Sequence[Doctor], args: argparse.Namespace
) -> Mapping[str, object] | None:
    """Return the settings, None if none were given.

    Raises:
        KVOffloadError: they cannot be read, or were given more than once.
    """
    found: list[Mapping[str, object]] = [read_settings(given, "--config")] if given else []
    found += [one for doctor in doctors if (one := doctor.find_settings(args)) is not None]
    if len(found) > 1:
        raise CommandError("settings are given twice: in --config and in the engine's own configuration")
    return found[0] if found else None


def setup_of(
    raw: Mapping[str, object] | None, doctors: Sequence[Doctor], args: argparse.Namespace
) -> tuple[Setup, Check]:
    """Return the setup, and the check of its settings. Sizes that were given come before those that follow from others.

    Raises:
        KVOffloadError: the sizes contradict each other, or cannot be found.
    """
    page, block = args.page_bytes, args.block_bytes
    if page and block and block % page:
        raise CommandError(f"--block-bytes {block} is no multiple of --page-bytes {page}")
    sizes = next((one for doctor in doctors if (one := doctor.find_sizes(args)) is not None), Sizes())
    config, finding = _parse(raw)
    given = (page,) * (block // page if block else 1) if page else ()
    setup = Setup(
        config=config,
        ranks=args.ranks or sizes.ranks,
        device_blocks=args.device_blocks or sizes.device_blocks,
        page_bytes=given or (sizes.page_bytes if block is None else ()),
        block_bytes=block or sizes.block_bytes,
        replicas=args.replicas,
        block_tokens=args.block_tokens or sizes.block_tokens,
    )
    return setup, concluded("settings", finding)


def _parse(raw: Mapping[str, object] | None) -> tuple[OffloadConfig | None, Finding]:
    if not raw:
        return OffloadConfig(), go("none given: the defaults are checked")
    try:
        config = parse_config(raw)
    except ConfigError as error:
        return None, no_go(str(error), "change what is named; docs/configure.md lists the settings")
    return config, go(", ".join(f"{name} {value}" for name, value in raw.items()))
