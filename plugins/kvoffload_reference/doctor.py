"""The doctor's check of the reference engine: it finds its plugin."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from kvoffload.checks.check import Check, Finding, Setup, go, no_go
from kvoffload.checks.machine import Machine
from kvoffload.checks.software import entry_point_problem

HELP = "reference engine"

_GROUP, _NAME, _VALUE = "kvoffload.engine_plugins", "kvoffload", "kvoffload_reference.plugin:plugin"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add nothing: the demo has the options."""


def find_settings(args: argparse.Namespace) -> Mapping[str, object] | None:
    """Return None: its settings are `--config`."""
    return None


def find_sizes(args: argparse.Namespace) -> None:
    """Return None: the demo chooses its sizes."""
    return None


def checks(args: argparse.Namespace) -> Sequence[Check]:
    """Return the one check."""
    return (Check("reference plugin", _registration),)


def _registration(_setup: Setup, machine: Machine) -> Finding:
    problem = entry_point_problem(machine, _GROUP, _NAME, _VALUE)
    if problem:
        return no_go(problem, "pip install kvoffload")
    return go(f"the reference engine will find its plugin by the entry point {_NAME!r} of {_GROUP}")
