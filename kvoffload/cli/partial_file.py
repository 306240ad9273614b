"""Files that appear under their name only when they are complete. Until then they have one that nobody can foresee."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from kvoffload.cli.exits import CommandError


@contextmanager
def written(target: Path, *, is_private: bool = False) -> Iterator[TextIO]:
    """Open a file that takes the place of `target` when all is written. A link there is replaced, not followed.

    Args:
        target: its name.
        is_private: it is its owner's alone; otherwise it has the usual permissions.

    Raises:
        CommandError: it cannot be written; what was there is still there.
    """
    partial: Path | None = None
    try:
        descriptor, partial = _open(target)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
        if not is_private:
            mask = os.umask(0)
            os.umask(mask)
            partial.chmod(0o666 & ~mask)
        os.replace(partial, target)
    except OSError as error:
        raise _refusal(target, error) from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()


def check_writable(target: Path) -> None:
    """Find out whether `written` would succeed, before anything that takes long; leaves nothing behind.

    Raises:
        CommandError: it would not.
    """
    try:
        descriptor, partial = _open(target)
        os.close(descriptor)
        partial.unlink()
    except OSError as error:
        raise _refusal(target, error) from error


def _open(target: Path) -> tuple[int, Path]:
    """Return a new file beside `target`, its owner's alone, as a descriptor and a path.

    Raises:
        OSError: there can be none, or `target` is something that must not be replaced by a file, such as /dev/null.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode) and not target.is_file():
            raise OSError(0, "it is a directory" if target.is_dir() else "it is not a regular file")
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent)
    return descriptor, Path(name)


def _refusal(target: Path, error: OSError) -> CommandError:
    return CommandError(f"{target} cannot be written: {error.strerror or error}")
