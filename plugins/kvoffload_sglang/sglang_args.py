"""`kvoffload sglang-args`: prints the command-line arguments that make a stock SGLang use kvoffload."""

from __future__ import annotations

import argparse
import json
import shlex

from kvoffload.checks.options import read_settings
from kvoffload_sglang.settings import BACKEND, OPTION, check_settings

HELP = "print the arguments with which SGLang uses kvoffload"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="SETTINGS",
        action="append",
        default=[],
        help="settings of the disk, the remote tier and the key: a JSON object, a file that holds one, or KEY=VALUE; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Print SGLang's arguments.

    Raises:
        ConfigError: the settings are invalid.
    """
    extra = {**BACKEND, **read_settings(args.config, "--config")}
    check_settings(extra)
    flags = "--enable-hierarchical-cache --hicache-storage-backend dynamic"
    print(f"{flags} {OPTION} {shlex.quote(json.dumps(extra, separators=(',', ':')))}")
    return 0
