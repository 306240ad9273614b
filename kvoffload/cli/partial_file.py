"""Output files that appear under their name only when they are complete; "-" is standard output."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from kvoffload.cli import signals
from kvoffload.cli.exits import OutputError

STDOUT = Path("-")


@contextmanager
def written(target: Path, *, is_private: bool = False) -> Iterator[TextIO]:
    """Open a file that replaces `target` once all is written. A link there is replaced, not followed.

    Args:
        target: its name; "-" for standard output.
        is_private: only the owner can read it; otherwise it has the usual permissions.

    Raises:
        OutputError: it cannot be written.
    """
    if target == STDOUT:
        yield sys.stdout
        return
    unfinished: Path | None = None
    try:
        descriptor, unfinished = _open(target)
        with (
            signals.undone_on_exit(partial(_remove, unfinished)),
            os.fdopen(descriptor, "w", encoding="utf-8") as file,
        ):
            yield file
        if not is_private:
            mask = os.umask(0)
            os.umask(mask)
            unfinished.chmod(0o666 & ~mask)
        os.replace(unfinished, target)
    except OSError as error:
        raise OutputError(target, error) from error
    finally:
        if unfinished is not None:
            _remove(unfinished)


def _open(target: Path) -> tuple[int, Path]:
    """Return a new file beside `target`, readable by its owner only, as a descriptor and a path.

    Raises:
        OSError: it cannot be made, or `target` is something that a file must not replace, such as /dev/null.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode) and not target.is_file():
            raise OSError(0, "it is a directory" if target.is_dir() else "it is not a regular file")
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent)
    return descriptor, Path(name)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
