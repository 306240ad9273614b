"""Defines and parses the options of `kvoffload demo`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from kvoffload.checks.options import positive, read_settings, seconds
from kvoffload.cli.exits import CommandError
from kvoffload.model.config import parse_config
from kvoffload.model.errors import ConfigError
from kvoffload.remote.address import parse_address as parse_store

if TYPE_CHECKING:
    from kvoffload.engine.config import GroupKind

LOCAL_STORES = {"mooncake": "Mooncake", "s3": "SeaweedFS (S3)"}
"""The values of --remote for which the demo starts a local server, each with the server's display name."""
LAYERS: dict[str, GroupKind] = {"full": "full", "window": "sliding_window", "recurrent": "recurrent"}
"""The values of --layers, each with the engine's name for this kind of layer."""
# The minimum number of turns before the kill: kvoffload spills a block only after a second turn has used it.
_LEAST_BEFORE = 2
_HOST_BYTES, _DISK_BYTES = "256MiB", "1GiB"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The conversations and the engines of one demo.

    Args:
        conversations: the number of conversations.
        turns: the number of turns in each conversation.
        first_tokens: the number of tokens in each conversation's first message.
        turn_tokens: the number of tokens in each later message.
        answer_tokens: the number of tokens in each answer.
        concurrency: the number of conversations served at the same time.
        model: "small" or "tiny".
        layers: a key of `LAYERS`. With "window" and "recurrent", every sixth layer still has full attention.
        device: "cpu", "cuda" or "cuda:N".
        device_blocks: the number of blocks in the device's KV cache; None for about a quarter of the blocks that the
            conversations need.
        seed: the seed of the model's weights and of the messages.
        offload: kvoffload's settings.
        killed_in: the turn, counted from 0, in which the demo kills the engine that begins the conversations; None to
            kill no engine.
    """

    conversations: int = 10
    turns: int = 5
    first_tokens: int = 1280
    turn_tokens: int = 128
    answer_tokens: int = 16
    concurrency: int = 2
    model: str = "small"
    layers: str = "full"
    device: str = "cpu"
    device_blocks: int | None = None
    seed: int = 0
    offload: Mapping[str, object] = field(default_factory=lambda: {"host_bytes": _HOST_BYTES})
    killed_in: int | None = None

    @property
    def conversation_tokens(self) -> int:
        """The length of the longest request: a conversation's last prompt and its answer, in tokens."""
        return self.first_tokens + (self.turns - 1) * self.turn_tokens + self.turns * self.answer_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to the parser. The help must fit on a terminal with 24 lines."""
    parser.usage = "kvoffload demo [OPTION...]"
    add, default = parser.add_argument, DemoOptions()
    add("--model", choices=("small", "tiny"), default=default.model, help="tiny: for a quick look")
    add("--layers", metavar="KIND", choices=LAYERS, default=default.layers, help=", ".join(LAYERS))
    numbers = {
        "conversations": "number of conversations",
        "turns": "turns of each",
        "first-tokens": "tokens of a first message",
        "turn-tokens": "tokens of each later message",
        "answer-tokens": "tokens of each answer",
    }
    for name, text in numbers.items():
        value = getattr(default, name.replace("-", "_"))
        add(f"--{name}", metavar="N", type=positive, default=value, help=text)
    add("--device", default=default.device, help='"cpu", "cuda" or "cuda:N"')
    add("--device-blocks", metavar="N", type=positive, help="of its cache (default: a quarter of the need)")
    add("--host-bytes", metavar="BYTES", help=f"host memory for offloading (default: {_HOST_BYTES})")
    lower = parser.add_mutually_exclusive_group()
    lower.add_argument("--disk", metavar="DIR", help="keep blocks in a folder of DIR too")
    lower.add_argument("--host-path", metavar="DIR", help="host memory in files of DIR, such as /dev/shm")
    lower.add_argument(
        "--remote", metavar="URL", type=_store, help="share a remote tier (mooncake, s3: a local one)"
    )
    add("--restart", action="store_true", help="with --disk or --host-path: kill the engine, go on")
    add("--config", metavar="KEY=VALUE", action="append", default=[], help="any other setting (repeatable)")
    add("--json", action="store_true", help="print one JSON object, not the table")
    add("--serve-metrics", metavar="PORT", type=_address, help="serve Prometheus metrics at [HOST:]PORT")
    add("--serve-for", metavar="SECONDS", type=seconds, help="go on serving them after the run")
    # The demo starts the process that it will kill with this option.
    add("--until-killed", help=argparse.SUPPRESS)


def demo_options(args: argparse.Namespace) -> DemoOptions:
    """Convert the parsed options. With a local remote tier, which is not running yet, `remote_url` is missing.

    Raises:
        KVOffloadError: the options contradict each other, or a setting has an invalid value.
    """
    if args.serve_for and args.serve_metrics is None:
        raise CommandError("--serve-for needs --serve-metrics")
    if args.restart and args.disk is None and args.host_path is None:
        raise CommandError("--restart needs --disk or --host-path: otherwise nothing is left after a restart")
    is_continued = args.restart or args.remote is not None
    if is_continued and args.turns <= _LEAST_BEFORE:
        raise CommandError(
            f"{'--restart' if args.restart else '--remote'} needs at least {_LEAST_BEFORE + 1} --turns: two before the "
            "engine is killed, as only what is found again is written to a tier, and one after"
        )
    names = {one.name for one in fields(DemoOptions)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if is_continued:
        given["killed_in"] = max(args.turns // 2, _LEAST_BEFORE)
    if args.remote is not None:
        given["concurrency"] = 1  # a time to first token then excludes other conversations' steps
    return DemoOptions(**given, offload=_settings(args))


def _settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the kvoffload settings that the options determine.

    Raises:
        KVOffloadError: a setting is given twice, or has an invalid value.
    """
    given = read_settings(
        args.config,
        "--config",
        host_bytes=args.host_bytes,
        host_path=args.host_path,
        disk_path=args.disk,
        remote_url=args.remote,
    )
    disk = {"disk_bytes": _DISK_BYTES} if args.disk is not None else {}
    if args.remote in LOCAL_STORES:
        del given["remote_url"]  # the URL is known after the local server has started
    settings = {"host_bytes": _HOST_BYTES, **disk, **given}
    parse_config(settings)
    return settings


def _store(text: str) -> str:
    """Validate the name of a local server, or a URL, for argparse's `type=`."""
    try:
        if text not in LOCAL_STORES:
            parse_store(text)
    except ConfigError as error:
        reason = str(error).replace("remote_url", "it")
        raise argparse.ArgumentTypeError(f'{reason}; "mooncake" or "s3" starts a local server') from error
    return text


def _address(text: str) -> tuple[str, int]:
    """Parse [HOST:]PORT for argparse's `type=`. The default host is the loopback address."""
    host, _, port = text.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or is_bare_ipv6:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT or PORT, with a port of 0 to 65535")
    return host.strip("[]") or "127.0.0.1", int(port)
