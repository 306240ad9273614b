"""`kvoffload host-memory PATH`: lists the host memory that engines keep below a `host_path`, and removes orphans."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.cli.exits import CommandError, Exit, say
from kvoffload.model.config import size_text
from kvoffload.model.errors import printable

if TYPE_CHECKING:
    from kvoffload.node.folder import Kept

HELP = "list the host memory that engines keep in files, and remove that of stopped engines"

_DEFAULT = Path("/dev/shm/kvoffload")
_SCHEMA = 1  # the version of the JSON output; a new version removes a field or changes a field's meaning
_RUNNING, _ELSEWHERE = "running", "of another container"  # a process of another container may have ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", nargs="?", type=Path, default=_DEFAULT, help="the setting host_path")
    which = parser.add_mutually_exclusive_group()
    words = "remove this folder of the list; may be repeated. Memory in use is never removed"
    which.add_argument("--remove", metavar="FOLDER", action="append", default=[], help=words)
    which.add_argument("--orphans", action="store_true", help="remove the memory of all stopped engines")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """List the folders below `args.path`, or remove some. Return 1 if a folder cannot be removed.

    Raises:
        KVOffloadError: the path cannot be read or is not on a tmpfs, or a folder to remove is not in the list.
    """
    found = _find(args.path)
    chosen = [kept for kept in found if kept.is_orphan] if args.orphans else _chosen(found, args)
    left = [kept for kept in chosen if not _removed(kept)]
    removed = [kept for kept in chosen if kept not in left]
    listed = [kept for kept in found if kept not in removed]
    if args.json:
        print(json.dumps(_plain(args.path, listed, removed), indent=1))
    else:
        for line in _removals(args.path, removed) if chosen or args.orphans else _table(args.path, listed):
            print(printable(line))
    return Exit.FAILED if left else Exit.OK


def _find(root: Path) -> list[Kept]:
    """Return the folders below `root` in which an engine has begun, the least recently begun first.

    Raises:
        CommandError: `root` cannot be read.
        ConfigError: `root` is not on a tmpfs.
    """
    from kvoffload.node.file_systems import check_tmpfs
    from kvoffload.node.folder import list_kept

    try:
        os.listdir(root)
        check_tmpfs(root)
    except OSError as error:
        problem = f"{root} cannot be read ({error.strerror}): give the path that the setting host_path names"
        raise CommandError(problem) from error
    return list_kept(root)


def _chosen(found: Sequence[Kept], args: argparse.Namespace) -> list[Kept]:
    by_name = {_name(args.path, kept): kept for kept in found}
    by_name |= {str(kept.path): kept for kept in found}
    unknown = [name for name in args.remove if name.rstrip("/") not in by_name]
    if unknown:
        names = ", ".join(_name(args.path, kept) for kept in found) or "there are none"
        raise CommandError(f"no engine's folder below {args.path}: {', '.join(unknown)}; folders: {names}")
    return [*dict.fromkeys(by_name[name.rstrip("/")] for name in args.remove)]


def _removed(kept: Kept) -> bool:
    from kvoffload.node.folder import remove_kept

    if remove_kept(kept):  # False for memory in use
        return True
    reason = "an engine uses it by now, or it cannot be removed" if kept.is_orphan else "an engine uses it"
    say(f"error: {kept.path} stays: {reason}")
    return False


# -- what is printed ------------------------------------------------------------------------------------------------


def _name(root: Path, kept: Kept) -> str:
    return str(kept.path.relative_to(root))


def _processes(kept: Kept) -> list[tuple[int, str]]:
    """Return number and state of each process that uses the memory or may still write to it."""
    from kvoffload.node.processes import may_run

    processes = dict.fromkeys((*kept.owner.processes, *kept.owner.former))  # each once
    states = [(each.pid, may_run(each)) for each in processes]
    return [(pid, _RUNNING if runs else _ELSEWHERE) for pid, runs in states if runs is not False]


def _table(root: Path, found: Sequence[Kept]) -> Iterator[str]:
    rows = [("folder", "bytes", "since", "state", "processes")]
    for kept in found:
        since = f"{datetime.fromtimestamp(kept.used_at):%Y-%m-%d %H:%M}"
        state = "orphan" if kept.is_orphan else "in use"
        pids = [str(pid) + "?" * (how == _ELSEWHERE) for pid, how in _processes(kept)]
        rows.append((_name(root, kept), size_text(kept.size), since, state, ", ".join(pids) or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else ():
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield from ["", *_sums(root, found)] if found else _sums(root, found)


def _sums(root: Path, found: Sequence[Kept]) -> Iterator[str]:
    from kvoffload.node.file_systems import free_bytes, room_text

    left = f"its tmpfs has {room_text(free_bytes(root))}"
    if not found:
        yield f"{root} has no engine's memory; {left}"
        return
    orphans = [kept.size for kept in found if kept.is_orphan]
    total = size_text(sum(kept.size for kept in found))
    yield f"{root}: {total} together, {size_text(sum(orphans))} of {len(orphans)} stopped engines; {left}"


def _removals(root: Path, removed: Sequence[Kept]) -> Iterator[str]:
    for kept in removed:
        yield f"removed {_name(root, kept)}: {size_text(kept.size)}"
    if not removed:
        yield "nothing was removed"


def _plain(root: Path, listed: Sequence[Kept], removed: Sequence[Kept]) -> dict[str, Any]:
    from kvoffload.node.file_systems import free_bytes
    from kvoffload.telemetry.provenance import describe_process

    return {
        "schema": _SCHEMA,
        "kind": "host-memory",
        "seen_from": describe_process(time.time()),
        "path": str(root),
        "left_bytes": free_bytes(root),
        "folders": [_plain_folder(kept) for kept in listed],
        "removed": [_plain_folder(kept) for kept in removed],
    }


def _plain_folder(kept: Kept) -> dict[str, Any]:
    return {
        "folder": str(kept.path),
        "kind": kept.path.parent.name,
        "bytes": kept.size,
        "since": round(kept.used_at, 3),
        "is_orphan": kept.is_orphan,
        "engine": kept.owner.engine,
        "processes": [{"pid": pid, "state": state} for pid, state in _processes(kept)],
    }
