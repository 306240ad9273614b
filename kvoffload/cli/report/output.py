"""Where a page goes: a file that appears under its name only when it is complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvoffload.cli.exits import CommandError
from kvoffload.cli.partial_file import complete, open_partial


def check_writable(target: Path) -> None:
    """Find out whether `write_page` would succeed, before anything that takes long; leaves nothing behind.

    Raises:
        CommandError: it would not.
    """
    try:
        descriptor, partial = open_partial(target)
        os.close(descriptor)
        partial.unlink()
    except OSError as error:
        raise _refusal(target, error) from error


def write_page(target: Path, text: str) -> None:
    """Write the page, in place of what was there.

    Raises:
        CommandError: the file cannot be written; what was there is still there.
    """
    partial: Path | None = None
    try:
        descriptor, partial = open_partial(target)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        # Counts, sizes and times, of no request by name: for whoever it is shown to.
        partial.chmod(0o666 & ~mask)
        complete(partial, target)
    except OSError as error:
        raise _refusal(target, error) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()


def _refusal(target: Path, error: OSError) -> CommandError:
    return CommandError(f"{target} cannot be written: {error.strerror or error}")
