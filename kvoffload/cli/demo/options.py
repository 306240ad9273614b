"""The demo's options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from kvoffload.checks.json_option import read_settings
from kvoffload.cli.demo.address import Address, parse_address
from kvoffload.cli.exits import CommandError
from kvoffload.cli.parser import positive, seconds
from kvoffload.model.errors import ConfigError
from kvoffload.remote.address import parse_address as parse_store

Attention = Literal["full", "sliding_window", "chunked_local", "recurrent"]

_REACH_TOKENS = 256  # the default of a window or chunk
_HOST_BYTES, _DISK_BYTES = "256MiB", "1GiB"
LEAST_BEFORE = 2
"""Turns before engines are killed, or others continue: what was not found again is not written below the host."""
_LEAST_TURNS = LEAST_BEFORE + 1
LOCAL_STORES = {"mooncake": "Mooncake", "s3": "SeaweedFS (S3)"}
"""Kinds of stores that a demo or a bench can start, and what they are."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of one demo.

    Args:
        documents: files with the text of the conversations; empty for the project's own.
        conversations: their number.
        turns: turns of each.
        first_tokens: the first message of each; tokens are bytes.
        turn_tokens: each later message.
        answer_tokens: tokens of each answer.
        concurrency: conversations served at a time.
        attention: kind of the model's local layers.
        reach_tokens: the window or the chunk; None for layers without one.
        model: "small", or "tiny" for a quick look.
        device: "cpu", "cuda" or "cuda:N".
        device_blocks: of the device's KV cache; None for a fraction of what the conversations need.
        seed: seed of the model's weights and of the distribution of the text.
        offload: kvoffload's settings, as typed.
        as_json: print one object instead of the table.
        metrics: address to serve metrics at; None to serve none.
        serve_for_s: seconds to serve them after the run.
        disk: folder for the disk below the host; None for none.
        restart: kill the engine half-way, and start it again on what is left.
        remote: the store that engines share: its URL, or the kind of a local one; None for none.
        engines: that share it.
    """

    documents: tuple[Path, ...] = ()
    conversations: int = 10
    turns: int = 5
    first_tokens: int = 1280
    turn_tokens: int = 128
    answer_tokens: int = 16
    concurrency: int = 2
    attention: Attention = "full"
    reach_tokens: int | None = None
    model: str = "small"
    device: str = "cpu"
    device_blocks: int | None = None
    seed: int = 0
    offload: Mapping[str, object] = field(default_factory=lambda: {"host_bytes": _HOST_BYTES})
    as_json: bool = False
    metrics: Address | None = None
    serve_for_s: float = 0.0
    disk: Path | None = None
    restart: bool = False
    remote: str | None = None
    engines: int = 2

    @property
    def message_tokens(self) -> int:
        """Return the tokens of one conversation's messages."""
        return self.first_tokens + (self.turns - 1) * self.turn_tokens

    @property
    def conversation_tokens(self) -> int:
        """Return the tokens of a conversation's last prompt and its answer: the longest request."""
        return self.message_tokens + self.turns * self.answer_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    _add_conversations(parser.add_argument_group("conversations"))
    _add_engine(parser.add_argument_group("engine"))
    _add_offloading(parser.add_argument_group("offloading"))
    _add_output(parser.add_argument_group("output"))


def demo_options(args: argparse.Namespace) -> DemoOptions:
    """Return the parsed options.

    Raises:
        KVOffloadError: they contradict each other, or --config cannot be read.
    """
    attention, reach = _attention(args.window, args.chunk, recurrent=args.recurrent)
    if args.serve_for and args.serve_metrics is None:
        raise CommandError("--serve-for needs --serve-metrics")
    _check_restart(args)
    _check_remote(args)
    if args.remote is not None and args.concurrency is None:
        args.concurrency = 1
    alike = {
        one.name: value for one in fields(DemoOptions) if (value := vars(args).get(one.name)) is not None
    }
    return DemoOptions(
        **alike,
        documents=tuple(args.document),
        attention=attention,
        reach_tokens=reach,
        offload=_offload_settings(
            args.host_bytes, args.store_policy, args.disk, args.config, has_store=args.remote is not None
        ),
        as_json=args.json,
        metrics=args.serve_metrics,
        serve_for_s=args.serve_for,
    )


def _add_conversations(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, DemoOptions()
    add("--document", metavar="FILE", type=Path, action="append", default=[],
        help="a file with the text of the conversations; may be repeated; Python's library follows if it is too short")  # fmt: skip
    numbers = {
        "conversations": "number of conversations",
        "turns": "turns of each",
        "first-tokens": "tokens of a first message; tokens are bytes",
        "turn-tokens": "tokens of each later message",
        "answer-tokens": "tokens generated in each turn",
    }
    for name, text in numbers.items():
        value = getattr(default, name.replace("-", "_"))
        add(f"--{name}", metavar="N", type=positive, default=value, help=text)
    add(
        "--concurrency",
        metavar="N",
        type=positive,
        help=f"conversations served at a time (default: {default.concurrency}; with --remote 1, so that no time to "
        "first token contains another conversation's steps)",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="of the model's weights and the distribution of the text",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, DemoOptions()
    add("--device", default=default.device, help='"cpu", "cuda" or "cuda:N"')
    add("--model", choices=("small", "tiny"), default=default.model, help="tiny: for a quick look")
    local = group.add_mutually_exclusive_group()
    for name, what in (("window", "sliding windows"), ("chunk", "local chunks")):
        local.add_argument(
            f"--{name}", metavar="TOKENS", type=positive, nargs="?", const=_REACH_TOKENS,
            help=f"five layers with {what} of TOKENS ({_REACH_TOKENS}) to one with full attention")  # fmt: skip
    local.add_argument(
        "--recurrent", action="store_true", help="five recurrent layers to one with full attention"
    )
    add("--device-blocks", metavar="N", type=positive,
        help="blocks of the device's cache (default: about a quarter of what the conversations need)")  # fmt: skip


def _add_offloading(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host-bytes", metavar="BYTES", help=f"host memory for offloading (default: {_HOST_BYTES})")
    add("--store-policy", choices=("eager", "lazy"), help="what is stored when (default: eager)")
    add(
        "--disk",
        metavar="DIR",
        type=Path,
        help=f"also keep blocks in a folder of DIR that is removed at the end, by default at most {_DISK_BYTES}",
    )
    add(
        "--restart",
        action="store_true",
        help="with --disk: kill the engine half-way (SIGKILL), start it again, and compare what comes after",
    )
    add(
        "--remote",
        metavar="URL",
        help="have engines share this store (remote_url), and compare what one of them finds that another has written; "
        '"mooncake" and "s3" start a local one for the time of the demo',
    )
    add(
        "--engines",
        metavar="N",
        type=positive,
        help=f"with --remote: engines, each in a process of its own (default: {DemoOptions().engines})",
    )
    add("--config", metavar="KEY=VALUE", action="append", default=[],
        help="any other setting of kvoffload, or a JSON object of them; may be repeated")  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--serve-metrics", metavar="[HOST:]PORT", type=parse_address,
        help="serve Prometheus metrics during the run; port 0 takes a free one")  # fmt: skip
    add("--serve-for", metavar="SECONDS", type=seconds, default=0.0,
        help="keep serving them after the run; Ctrl-C or SIGTERM ends it")  # fmt: skip


def _attention(window: int | None, chunk: int | None, *, recurrent: bool) -> tuple[Attention, int | None]:
    if recurrent:
        return "recurrent", None
    if window is not None:
        return "sliding_window", window
    return ("chunked_local", chunk) if chunk is not None else ("full", None)


def _offload_settings(
    host_bytes: str | None,
    store_policy: str | None,
    disk: Path | None,
    given: Sequence[str],
    *,
    has_store: bool,
) -> dict[str, object]:
    typed = {"host_bytes": host_bytes, "store_policy": store_policy}
    settings = {key: value for key, value in typed.items() if value is not None}
    others = read_settings(given, "--config")
    for key in settings.keys() & others.keys():
        raise CommandError(f"{key} is set twice: by --{key.replace('_', '-')} and by --config")
    if has_store and "remote_url" in others:
        raise CommandError("remote_url is set twice: by --remote and by --config")
    sizes = {"host_bytes", "host_bytes_per_rank", "cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"}
    default = {} if sizes & (settings.keys() | others.keys()) else {"host_bytes": _HOST_BYTES}
    if disk is not None:
        if "disk_path" in others:
            raise CommandError("disk_path is set twice: by --disk and by --config")
        if not {"disk_bytes", "disk_bytes_per_rank"} & others.keys():
            default["disk_bytes"] = _DISK_BYTES
    return {**default, **settings, **others}


def _check_restart(args: argparse.Namespace) -> None:
    if not args.restart:
        return
    if args.disk is None:
        raise CommandError("--restart needs --disk: without a disk nothing is left after a restart")
    _check_in_processes(
        args, "--restart", "two before it, as only what is found again is written, and one after"
    )


def _check_remote(args: argparse.Namespace) -> None:
    if args.remote is None:
        if args.engines is not None:
            raise CommandError("--engines needs --remote: without a store engines share nothing")
        return
    if args.engines == 1:
        raise CommandError("--engines must be at least 2: one engine shares with no other")
    for name, given in (("--disk", args.disk), ("--restart", args.restart or None)):
        if given is not None:
            raise CommandError(
                f"{name} does not go with --remote, whose engines have host memory and the store alone"
            )
    turns = "two on the first engine, as only what is found again is written, and one on the next"
    _check_in_processes(args, "--remote", turns)
    if args.remote not in LOCAL_STORES:
        _check_url(args.remote)


def _check_in_processes(args: argparse.Namespace, option: str, turns: str) -> None:
    """Check what demos with several processes have in common."""
    if args.turns < _LEAST_TURNS:
        raise CommandError(f"{option} needs at least {_LEAST_TURNS} --turns: {turns}")
    if args.serve_metrics is not None:
        raise CommandError(
            f"--serve-metrics does not go with {option}, which runs engines in processes of their own"
        )


def _check_url(url: str) -> None:
    try:
        parse_store(url)
    except ConfigError as error:
        kinds = " or ".join(f'"{kind}"' for kind in LOCAL_STORES)
        raise CommandError(f"--remote: {error}; {kinds} starts a local store") from error
