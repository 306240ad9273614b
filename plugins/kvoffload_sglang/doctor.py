"""The doctor's checks for SGLang. This module does not import SGLang, because the import takes seconds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import NoReturn

from kvoffload.checks.check import Check, Finding, Given, Setup, Sizes, fail, ok, unknown, warn
from kvoffload.checks.options import positive, read_object
from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError
from kvoffload_sglang.settings import BACKEND, OPTION, check_settings

HELP = "SGLang"

_RUN = "0.5.23"
_ARGS = "add what `kvoffload sglang-args` prints"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"SGLang's command line: {message}"])


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add nothing: the checks read SGLang's options from SGLang's own command line."""


def read_arguments(args: argparse.Namespace) -> Given:
    """Return the settings, sizes and checks that SGLang's command line determines.

    Raises:
        ConfigError: an option in the command line, or SGLang's extra config, cannot be read.
    """
    if not args.command_line:
        text = "give SGLang's own command line: kvoffload doctor --engine sglang -- python -m sglang.launch_server ..."
        options = Check("sglang options", lambda _: unknown("SGLang's options", text))
        return Given(None, Sizes(), (VERSION, options), _parse)
    line = make_parser().parse_known_args(args.command_line)[0]
    extra = None if line.extra_config is None else read_object(line.extra_config.removeprefix("@"), OPTION)
    checks = (VERSION, Check("sglang options", lambda setup: _options(line, extra, setup)))
    return Given(extra, Sizes(engines=line.dp_size), checks, _parse)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser for the SGLang options that the checks read."""
    add = (parser := _Parser(add_help=False)).add_argument
    add("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
    add("--disable-radix-cache", action="store_true")
    add("--enable-lora", action="store_true")
    add("--lora-paths", nargs="*")
    add("--load-format", default="auto")
    add("--hicache-storage-backend")
    add(OPTION, dest="extra_config")
    add("--dp-size", "--data-parallel-size", type=positive, default=1)
    return parser


def _parse(settings: Mapping[str, object]) -> OffloadConfig:
    return check_settings({**BACKEND, **settings})


def _options(line: argparse.Namespace, extra: Mapping[str, object] | None, setup: Setup) -> Finding:
    if not line.enable_hierarchical_cache:
        return fail("the command line has no --enable-hierarchical-cache", _ARGS)
    if line.hicache_storage_backend is None:
        return warn(
            "the command line has no --hicache-storage-backend; it must be attached over HTTP later", _ARGS
        )
    if problems := "; ".join(_problems(line, extra or {}, setup)):
        return fail(problems, f"correct these options, or {_ARGS}")
    return ok("the storage backend works with them")


def _problems(line: argparse.Namespace, extra: Mapping[str, object], setup: Setup) -> Iterator[str]:
    if line.hicache_storage_backend != "dynamic":
        yield f"--hicache-storage-backend is {line.hicache_storage_backend}, not dynamic"
    for name in ("module_path", "class_name", "interface_v1"):
        if extra.get(name) != BACKEND[name]:
            yield f"{name} in {OPTION} is {extra.get(name)!r}, not {BACKEND[name]!r}"
    if not extra.get("backend_name"):
        yield f"{OPTION} has no backend_name"
    if line.disable_radix_cache:
        yield "--disable-radix-cache excludes HiCache"
    if line.enable_lora or line.lora_paths:
        yield "LoRA is on, and SGLang's keys do not know an adapter's weights"
    if line.load_format == "dummy" and setup.config.weights_id is None:
        yield "--load-format is dummy, so the weights cannot be identified without weights_id"


def _version(_: Setup) -> Finding:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return unknown("SGLang is not installed in this environment", "run the doctor where SGLang is")
    if version.split("+")[0] != _RUN:
        return warn(f"SGLang {version} was never run with kvoffload", f"try it first: {_RUN} was run")
    return ok(f"SGLang {version}")


VERSION = Check("sglang version", _version)
