"""Runs scripts of this folder with the packages of this checkout or of another one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

from kvoffload.cli.exits import CommandError

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent


def add_beside_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beside", metavar="DIR", type=_checkout, help="another checkout of this repository")


def _checkout(text: str) -> Path:
    # Without the packages in it, the scripts would run with the installed ones.
    if not (Path(text) / "kvoffload").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of this repository")
    return Path(text).resolve()


@contextmanager
def running(
    name: str,
    arguments: Sequence[str],
    checkout: Path,
    *,
    before: Sequence[str] = (),
    modules: Path | None = None,
) -> Iterator[Callable[[], str]]:
    """Run a script until the `with` block ends. Yield a function that asks it for its next line, by an empty line.

    The function raises a `CommandError` if the script ends without a line.

    Args:
        name: the script's name. It uses only what both checkouts have.
        arguments: the script's arguments.
        checkout: the script finds the packages of this checkout.
        before: the words of a command that runs Python.
        modules: a folder with further modules.
    """
    # Safe path: beside the script are modules with names of the standard library.
    command = [*before, sys.executable, "-P", str(HERE / name), *arguments]
    path = os.pathsep.join(map(str, filter(None, (checkout, checkout / "plugins", modules))))
    env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        asked, answers, errors = process.stdin, process.stdout, process.stderr

        def ask() -> str:
            with suppress(BrokenPipeError):
                print(file=asked, flush=True)
            if not (answer := answers.readline()):
                raise CommandError(f"{name} failed with {checkout}: {errors.read().strip()}")
            return answer

        yield ask
