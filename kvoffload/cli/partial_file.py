"""Files that appear under their name only when they are complete. Until then they have one that nobody can foresee."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def open_partial(target: Path) -> tuple[int, Path]:
    """Return a new file beside `target`, its owner's alone, as a descriptor and a path.

    Raises:
        OSError: there can be none, or `target` is something that must not be replaced by a file, such as /dev/null.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(target.lstat().st_mode) and not target.is_file():
            raise OSError(0, "it is a directory" if target.is_dir() else "it is not a regular file")
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent)
    return descriptor, Path(name)


def complete(partial: Path, target: Path) -> None:
    """Give a file its name, in place of what was there. A link there is replaced, not followed.

    Raises:
        OSError: it cannot be had; what was there is still there.
    """
    os.replace(partial, target)
