"""What an engine's adapter adds to the doctor. Found by entry point, as only adapters may name an engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

from kvoffload.checks.check import Check, concluded, no_go

ENTRY_POINT_GROUP = "kvoffload.doctors"
"""Its entry points name modules that are a `Doctor` each."""


class Doctor(Protocol):
    """What an adapter's module holds. Importing it must be cheap: it is, whenever the command runs."""

    HELP: str

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Say which options it has."""

    def find_settings(self, args: argparse.Namespace) -> Mapping[str, object] | None:
        """Return kvoffload's settings where the engine's own, as given, hold them.

        Raises:
            KVOffloadError: what was given cannot be read.
        """

    def checks(self, args: argparse.Namespace) -> Sequence[Check]:
        """Return its checks."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of this environment.

    Args:
        doctors: by name.
        lost: those that cannot be imported, and why.
    """

    doctors: Mapping[str, Doctor]
    lost: Mapping[str, str]

    def lost_checks(self) -> Iterator[Check]:
        """Return a check that fails for each that cannot be imported."""
        for name, reason in self.lost.items():
            finding = no_go(
                f"the checks of the adapter {name!r} cannot be imported: {reason}", "install kvoffload anew"
            )
            yield concluded(name, finding)


def find_adapters() -> Adapters:
    """Import what this environment has. One that cannot be imported harms no other, and no other command."""
    doctors: dict[str, Doctor] = {}
    lost: dict[str, str] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda one: one.name):
        try:
            doctors[point.name] = cast("Doctor", point.load())
        except (ImportError, AttributeError) as error:
            lost[point.name] = str(error)
    return Adapters(doctors, lost)
