"""Where a page goes: a file that appears under its name only when it is complete."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from kvoffload.cli.exits import CommandError


def check_writable(target: Path) -> None:
    """Find out whether `write_page` would succeed, before anything that takes long; leaves nothing behind.

    Raises:
        CommandError: it would not.
    """
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        descriptor, name = _open_partial(target)
        os.close(descriptor)
        Path(name).unlink()
    except OSError as error:
        raise _refusal(target, error) from error


def write_page(target: Path, text: str) -> None:
    """Write the page, in place of what was there.

    Raises:
        CommandError: the file cannot be written; what was there is still there.
    """
    partial: str | None = None
    try:
        descriptor, partial = _open_partial(target)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)  # a temporary file is its owner's alone; this one is for reading
        os.replace(partial, target)
    except OSError as error:
        raise _refusal(target, error) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                Path(partial).unlink()


def _open_partial(target: Path) -> tuple[int, str]:
    return tempfile.mkstemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent)


def _refusal(target: Path, error: OSError) -> CommandError:
    return CommandError(f"{target} cannot be written: {error.strerror or error}")
