"""Writes output files. A file gets its name only when the file is complete; the name "-" means standard output."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from kvoffload.cli.exits import OutputError

STDOUT = Path("-")


@contextmanager
def written(target: Path, *, is_private: bool = False) -> Iterator[TextIO]:
    """Open a new file, which replaces `target` if the `with` block ends without an exception.

    If `target` is a symbolic link, the file replaces the link.

    Args:
        target: the path of the output; "-" for standard output.
        is_private: True if only the owner may read the file; False if the umask determines the permissions.

    Raises:
        OutputError: the file cannot be written.
    """
    if target == STDOUT:
        yield sys.stdout
        return
    unfinished = Path(f"{target}.{secrets.token_hex(4)}.partial")
    mode = 0o600 if is_private else 0o666
    try:
        if target.exists() and not target.is_file():  # a device such as /dev/null, or a pipe
            raise OSError(0, "it is a directory" if target.is_dir() else "it is not a regular file")
        with open(unfinished, "x", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            yield file
        os.replace(unfinished, target)
    except OSError as error:
        raise OutputError(target, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
