"""Reads traces: files of JSON lines, optionally gzipped, with one request in each line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353, 2354]}

`hash_ids` has a hash for each whole block of the prompt, and may have one for the rest. Two prompts have equal
prefixes as long as their hashes are equal. Mooncake publishes such traces with blocks of 512 tokens and times in
milliseconds, and Qwen-Bailian with blocks of 16 tokens and times in seconds.

A trace does not say what a block or a unit of time is. The reader derives both from the lines where only one answer
fits them, and otherwise asks for an option.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from kvoffload.cli.exits import CommandError
from kvoffload.model.ids import BlockKey, GroupId
from tests.keys import block_key

SECONDS_IN = {"ms": 0.001, "s": 1.0}
"""How many seconds each unit of time has."""
GROUP = GroupId(0)
_MOST_PER_S = 100  # without an option, more requests in a second are taken for another unit of time
_GZIP = b"\x1f\x8b"


class Row(msgspec.Struct):
    """The fields of a line that are read."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int]


class Prompt(NamedTuple):
    at_s: float
    tokens: int
    keys: tuple[BlockKey, ...]  #: the keys of the prompt's whole blocks
    session: int = 0
    is_last_turn: bool = False


class Trace(NamedTuple):
    block_tokens: int
    prompts: Sequence[Prompt]


def read_trace(path: Path, block_tokens: int | None = None, time_unit: str | None = None) -> Trace:
    """Return the requests of a trace.

    Args:
        path: the file.
        block_tokens: how many tokens a hash stands for; None to derive it from the lines.
        time_unit: the unit of timestamps, one of `SECONDS_IN`; None for milliseconds, if that is plausible.

    Raises:
        CommandError: the file cannot be read, is not a trace, or has lines that contradict each other.
    """
    rows = list(_rows(path))
    if not rows:
        raise CommandError(f"{path} has no requests")
    size = _block_tokens(path, rows, block_tokens)
    second = SECONDS_IN[time_unit or _plausible_unit(path, rows)]
    keys: dict[tuple[BlockKey | None, int], BlockKey] = {}
    prompts = [
        Prompt(
            row.timestamp * second, row.input_length, _keys(keys, row.hash_ids[: row.input_length // size])
        )
        for row in rows
    ]
    return Trace(size, prompts)


def _rows(path: Path) -> Iterator[Row]:
    decoder, before = msgspec.json.Decoder(Row), 0.0
    for number, line in enumerate(_lines(path), 1):
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CommandError(f"{path}, line {number}: no request of a trace: {error}") from error
        if row.timestamp < before:
            raise CommandError(f"{path}, line {number}: timestamp {row.timestamp:g} after {before:g}")
        before = row.timestamp
        yield row


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            is_packed = raw.peek(len(_GZIP)).startswith(_GZIP)
            yield from gzip.GzipFile(fileobj=raw) if is_packed else raw
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CommandError(f"{path} cannot be read: {reason}") from error


def _block_tokens(path: Path, rows: Sequence[Row], given: int | None) -> int:
    """Return the block size with which every row has a hash for each whole block, and at most one more.

    If several sizes fit, return the only power of two among them.
    """
    low, high = (1, math.inf) if given is None else (given, given)
    for number, row in enumerate(rows, 1):
        hashes, tokens = len(row.hash_ids), row.input_length
        least = tokens // (hashes + 1) + 1
        most = -(-tokens // (hashes - 1)) - 1 if hashes > 1 else math.inf
        if max(low, least) > min(high, most):
            raise CommandError(
                f"{path}, line {number}: {hashes} hashes for {tokens} tokens mean blocks of {_span(least, most)}, "
                f"not of {_span(low, high)}"
            )
        low, high = max(low, least), min(high, most)
    if low == high:
        return low
    power = 1 << (low - 1).bit_length()  # the least power of two that fits
    if not power <= high < 2 * power:
        raise CommandError(f"{path} may have blocks of {_span(low, high)}: give --block-tokens")
    return power


def _span(low: int, high: float) -> str:
    if low >= high:
        return f"{low} tokens"
    return f"{low} tokens or more" if high == math.inf else f"{low} to {high:.0f} tokens"


def _plausible_unit(path: Path, rows: Sequence[Row]) -> str:
    """Return milliseconds, unless the timestamps may be seconds.

    Raises:
        CommandError: the timestamps have fractions, or more requests than `_MOST_PER_S` would come in a second.
    """
    odd = next((row.timestamp for row in rows if row.timestamp % 1), None)
    seconds = (rows[-1].timestamp - rows[0].timestamp) * SECONDS_IN["ms"]
    reason = None if odd is None else f"timestamps such as {odd:g}"
    if len(rows) > _MOST_PER_S * max(seconds, 1.0):
        reason = f"{len(rows):,} requests within {seconds:.1f} s if timestamps are milliseconds"
    if reason is not None:
        raise CommandError(f"{path} has {reason}: give --time-unit {' or '.join(SECONDS_IN)}")
    return "ms"


def _keys(known: dict[tuple[BlockKey | None, int], BlockKey], ids: Sequence[int]) -> tuple[BlockKey, ...]:
    """Return the keys of blocks. Equal keys mean equal prefixes, also where hashes are of the blocks alone."""
    keys: list[BlockKey] = []
    for each in ids:
        place = keys[-1] if keys else None, each
        if place not in known:
            known[place] = block_key(b"%032x" % len(known), GROUP)
        keys.append(known[place])
    return tuple(keys)
