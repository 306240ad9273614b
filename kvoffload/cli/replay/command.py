"""`kvoffload replay-journal`: does a core decide again as the journal says, and do its laws hold?"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.parser import positive

if TYPE_CHECKING:
    from kvoffload.cli.replay.player import Player

HELP = "drive the scheduler side's decisions through a journal again, and show the first one that differs"

_BEFORE, _BEHIND, _WIDTH = 6, 2, 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "journal",
        metavar="FILE",
        type=Path,
        help='what an engine with `journal_path` and `journal_for: "replay"` wrote',
    )
    parser.add_argument(
        "--audit-every",
        metavar="N",
        type=positive,
        default=1,
        help="audit the conservation laws after every N facts and questions (default 1); large pools take their time",
    )


def run(args: argparse.Namespace) -> int:
    """Replay the journal; 0 where all of it comes out as recorded and every law holds.

    Raises:
        KVOffloadError: the journal cannot be read, does not carry what a replay needs, or is of another version.
    """
    from kvoffload.cli.replay.player import Player

    journal: Path = args.journal
    player = Player(args.audit_every)
    found = _play(journal, player)
    counts = f"{player.facts} facts, {player.questions} questions, {player.events} events"
    if found is not None:
        print(found)
        print(f"kvoffload: {journal}: stopped after {counts}", file=sys.stderr)
        return Exit.FAILED
    print(f"{journal}: {counts}; all as recorded, and every law holds")
    return Exit.OK


def _play(journal: Path, player: Player) -> str | None:
    """Return what is wrong, with its line and its surroundings.

    Raises:
        KVOffloadError: as `run`.
    """
    from kvoffload.cli.replay.device import Diverged
    from kvoffload.cli.replay.player import Violation
    from kvoffload.telemetry.journal import JournalError, read_journal

    number = 0
    try:
        for number, record in enumerate(read_journal(journal), 1):  # noqa: B007  # told when a line is refused
            player.play(record)
        player.end()
    except JournalError as error:
        if not player.facts:
            raise
        return f"{error}\nall before it is as recorded, and every law holds"
    except (Diverged, Violation) as error:
        return f"{journal}, line {number}: {error}\n{_around(journal, number)}"
    except (ValueError, KeyError, TypeError, AttributeError, CommandError) as error:
        raise CommandError(f"{journal}, line {number}: {_refusal(error)}") from error
    if not number:
        raise CommandError(f"{journal} is empty: the engine has not told anything yet")
    return None


def _refusal(error: Exception) -> str:
    if isinstance(error, CommandError):
        return str(error)
    return f"not what a journal for a replay has: {error!r}"


def _around(journal: Path, number: int) -> str:
    """Return the lines around one, shortened."""
    first = max(number - _BEFORE, 1)
    with journal.open(encoding="utf-8") as file:
        lines = list(islice(file, first - 1, number + _BEHIND))
    return "\n".join(
        f"{'>' if place == number else ' '} {place:6} {line.rstrip()[:_WIDTH]}"
        for place, line in enumerate(lines, first)
    )
