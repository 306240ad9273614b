"""`kvoffload timeline`: turns a journal into a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
from itertools import chain

import kvoffload
from kvoffload.cli.exits import Exit, say
from kvoffload.cli.journal_lines import add_journal_arguments, opened
from kvoffload.cli.partial_file import written

HELP = "write a journal as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing"

_SUFFIX = ".trace.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_journal_arguments(parser, _SUFFIX)


def run(args: argparse.Namespace) -> int:
    """Write the trace of the selected lines. The command fails if the trace shows none of them.

    Raises:
        KVOffloadError: no line of the journal can be read, or the trace cannot be written.
    """
    from kvoffload.telemetry.records import summary_of
    from kvoffload.telemetry.timeline import write_trace

    lines, output = opened(args, _SUFFIX)
    records = iter(lines)
    first = next(records)  # raises before the output file exists if the journal cannot be read
    # Like the journal, the trace has request names.
    with written(output, is_private=True) as file:
        shows_events = write_trace(chain([first], records), file, lambda: lines.provenance)
    code = lines.report(output)
    name = summary_of(first.message).name
    if shows_events:
        return code
    say(f"the trace is empty: kvoffload {kvoffload.__version__} draws none of these events, such as {name}")
    return Exit.FAILED
