"""`kvoffload settings`: lists every setting with the default, the meaning and the allowed values."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from itertools import groupby

from kvoffload.model.config import ADVANCED, SETTINGS

HELP = "list the settings, each with its default, its meaning and the allowed values"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no options."""


def run(_: argparse.Namespace) -> int:
    """Print all settings. Settings that few users need come last."""
    width = min(shutil.get_terminal_size().columns, 100)
    for is_advanced, settings in groupby(SETTINGS.items(), lambda item: item[0] in ADVANCED):
        if is_advanced:
            print("\nAdvanced: leave these as they are unless you work around a problem.\n")
        for name, setting in settings:
            print(f"{name:<28}{setting.default}")
            for text in (setting.meaning, setting.allowed):
                print(textwrap.indent(textwrap.fill(text, width - 4), "    "))
    return 0
