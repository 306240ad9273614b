"""The checks of the engines' adapters, found by entry point, because only adapters may name an engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

from kvoffload.checks.check import Check, Sizes, concluded, no_go

ENTRY_POINT_GROUP = "kvoffload.doctors"
"""Its entry points name modules that are a `Doctor` each."""


class Doctor(Protocol):
    """What an adapter's module holds. Importing it must be cheap: every command does."""

    HELP: str

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the adapter's options to the parser."""

    def find_settings(self, args: argparse.Namespace) -> Mapping[str, object] | None:
        """Return kvoffload's settings from the engine's own, None if there are none.

        Raises:
            KVOffloadError: what was given cannot be read.
        """

    def find_sizes(self, args: argparse.Namespace) -> Sizes | None:
        """Return the sizes that follow from what was given, None if none do.

        Raises:
            KVOffloadError: what was given cannot be read.
        """

    def checks(self, args: argparse.Namespace) -> Sequence[Check]:
        """Return the adapter's checks."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of this environment.

    Args:
        doctors: by name.
        lost: names of those that cannot be imported, and the reason.
    """

    doctors: Mapping[str, Doctor]
    lost: Mapping[str, str]

    def lost_checks(self) -> Iterator[Check]:
        """Yield a failing check for each adapter that cannot be imported."""
        for name, reason in self.lost.items():
            finding = no_go(
                f"the checks of the adapter {name!r} cannot be imported: {reason}", "install kvoffload again"
            )
            yield concluded(name, finding)


def find_adapters() -> Adapters:
    """Import the adapters of this environment. One that cannot be imported does not affect the others."""
    doctors: dict[str, Doctor] = {}
    lost: dict[str, str] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name):
        try:
            doctors[point.name] = cast("Doctor", point.load())
        except (ImportError, AttributeError) as error:
            lost[point.name] = str(error)
    return Adapters(doctors, lost)
