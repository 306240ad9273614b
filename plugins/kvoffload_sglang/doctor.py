"""The doctor's checks for SGLang. This module does not import SGLang, because the import takes seconds."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any, NoReturn

from kvoffload.checks.ask import ask_engine
from kvoffload.checks.check import Check, Finding, Given, Setup, Sizes, Verdict, fail, ok, unknown, warn
from kvoffload.checks.launch import Launch, find_launch
from kvoffload.checks.model_file import ModelUnread, read_model_file
from kvoffload.checks.options import read_object
from kvoffload.model.config import OffloadConfig
from kvoffload.model.errors import ConfigError
from kvoffload_sglang.settings import BACKEND, OPTION, check_settings

HELP = "SGLang"

COMMANDS = re.compile(
    r"sglang\.launch_server|(?:\S*/)?sglang/launch_server\.py|(?:\S*/)?sglang serve|dynamo\.sglang"
)
"""The commands that start SGLang's server."""
EXAMPLE = "python -m sglang.launch_server ..., docker run IMAGE ..., or a pod's args"

_RUN = "0.5.23"
_EXTRA = "hicache_storage_backend_extra_config"
_ARGS = "add what `kvoffload sglang-args` prints"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"SGLang's command line: {message}"])


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add nothing: the checks read SGLang's options from SGLang's own command line."""


def read_arguments(args: argparse.Namespace) -> Given:
    """Return the settings, sizes and checks that SGLang's command line determines."""
    if not args.command_line:
        text = "give SGLang's own command line: kvoffload doctor --engine sglang -- python -m sglang.launch_server ..."
        options = Check("sglang options", lambda _: unknown("SGLang's options", text))
        return Given(None, Sizes(), (VERSION, options), _parse)
    try:
        launch = find_launch(args.command_line, COMMANDS, EXAMPLE)
        line = make_parser().parse_known_args(launch.arguments)[0]
    except ConfigError as error:
        finding = fail(str(error), "correct the command line")
        missing = unknown("SGLang's command line cannot be read", finding.remedy)
        check = Check("sglang options", lambda _: finding)
        return Given(None, Sizes(), (VERSION, check), _parse, missing)
    return _given_by_line(launch, line)


def _given_by_line(launch: Launch, line: argparse.Namespace) -> Given:
    """Return what SGLang's command line determines.

    Args:
        launch: the command line.
        line: its options, as read without SGLang.
    """
    reply = ask_engine("SGLang", launch, "kvoffload_sglang.doctor_child")
    values = reply.get("values", {})
    extra, unread = _extra(values.get(_EXTRA) or line.extra_config, launch)
    if line.enable_dp_attention:  # as in SGLang, the replicas are then only those of attention
        line.attn_dp_size = line.dp_size or 1
        line.dp_size = 1
    line = argparse.Namespace(**vars(line) | values)
    line.has_latents = reply.get("is_mla", _has_latents(line, launch.local_environ))
    sizes = Sizes(engines=line.dp_size * line.attn_dp_size or 1)
    missing = None if values else _unread_file(line, reply)
    if missing is not None and "refused" not in reply:
        return Given(extra, sizes, (VERSION, Check("sglang options", lambda _: missing)), _parse, missing)
    check = Check("sglang options", lambda setup: _options(line, extra, reply, setup, unread))
    return Given(extra, sizes, (VERSION, check), _parse, missing or unread)


def _unread_file(line: argparse.Namespace, reply: Mapping[str, Any]) -> Finding | None:
    """Return a finding about the file that `--config` names, which may contain any option; None without such a file."""
    if line.config is None:
        return None
    reason = reply.get("unknown", "SGLang refuses the command line")
    return unknown(f"only SGLang reads the file of --config {line.config}: {reason}", reply.get("remedy", ""))


def _extra(text: str | None, launch: Launch) -> tuple[dict[str, object] | None, Finding | None]:
    """Return SGLang's extra config, which is JSON or names a file after "@"; or a finding if it cannot be read."""
    if text is None:
        return None, None
    if text.startswith("@") and launch.image:
        reason = f"{OPTION} names a file in the image {launch.image}"
        return None, unknown(reason, "run the doctor in that image")
    try:
        return read_object(text.removeprefix("@"), OPTION), None
    except ConfigError as error:
        return None, fail(str(error), "correct it")


def _count(text: str) -> int:
    """Parse a number of ranks; return 0 for what is not one, so that the other options are still read."""
    return int(text) if text.isdecimal() else 0


def make_parser() -> argparse.ArgumentParser:
    """Return a parser for the SGLang options that the checks read."""
    add = (parser := _Parser(add_help=False)).add_argument
    add("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
    add("--disable-radix-cache", action="store_true")
    add("--enable-dp-attention", action="store_true")
    add("--enable-lora", action="store_true")
    add("--lora-paths", nargs="*")
    add("--load-format", default="auto")
    add("--config")
    add("--model-path", "--model")
    add("--revision")
    add("--hicache-storage-backend")
    add(OPTION, dest="extra_config")
    add("--attn-dp-size", type=_count, default=1)
    add("--dp-size", "--data-parallel-size", type=_count, default=1)
    add("--tp-size", "--tensor-parallel-size", type=_count, default=1)
    return parser


def _parse(settings: Mapping[str, object]) -> OffloadConfig:
    return check_settings({**BACKEND, **settings})


def _options(
    line: argparse.Namespace,
    extra: Mapping[str, object] | None,
    reply: Mapping[str, Any],
    setup: Setup,
    unread: Finding | None,
) -> Finding:
    if (refused := reply.get("refused")) is not None:
        return fail(f"SGLang {reply['version']} refuses them: {refused}", "correct these options")
    if not (line.tp_size and line.dp_size and line.attn_dp_size):
        return fail("--tp-size and --dp-size must be whole numbers of at least 1", "correct these options")
    if not line.enable_hierarchical_cache:
        return fail("the command line has no --enable-hierarchical-cache", _ARGS)
    if line.hicache_storage_backend is None:
        return warn(
            "the command line has no --hicache-storage-backend; it must be attached over HTTP later", _ARGS
        )
    of_extra = _extra_problems(extra or {}) if unread is None else _unread_problems(unread)
    if problems := [*_problems(line, setup), *of_extra, *_model_problems(line, reply, setup)]:
        return fail("; ".join(problems), f"correct these options, or {_ARGS}")
    return unread or _without_problems(reply)


def _without_problems(reply: Mapping[str, Any]) -> Finding:
    if "unknown" in reply:
        return unknown(f"what SGLang makes of them: {reply['unknown']}", reply["remedy"])
    return ok(f"SGLang {reply['version']} accepts them, and the storage backend works with them")


def _unread_problems(unread: Finding) -> Iterator[str]:
    if unread.verdict is Verdict.ERROR:
        yield unread.text


def _extra_problems(extra: Mapping[str, object]) -> Iterator[str]:
    for name in ("module_path", "class_name", "interface_v1"):
        if extra.get(name) != BACKEND[name]:
            yield f"{name} in {OPTION} is {extra.get(name)!r}, not {BACKEND[name]!r}"
    if not extra.get("backend_name"):
        yield f"{OPTION} has no backend_name"


def _problems(line: argparse.Namespace, setup: Setup) -> Iterator[str]:
    if line.hicache_storage_backend != "dynamic":
        yield f"--hicache-storage-backend is {line.hicache_storage_backend}, not dynamic"
    if line.disable_radix_cache:
        yield "--disable-radix-cache excludes HiCache"
    if line.enable_lora or line.lora_paths:
        yield "LoRA is on, and SGLang's keys do not know an adapter's weights"
    if line.load_format == "dummy" and setup.config.weights_id is None:
        yield "--load-format is dummy, so the weights cannot be identified without weights_id"


def _model_problems(line: argparse.Namespace, reply: Mapping[str, Any], setup: Setup) -> Iterator[str]:
    """Yield the reasons why the storage backend would refuse the model, or a draft model."""
    ranks = line.tp_size // line.attn_dp_size
    if setup.config.disk_path is not None and ranks > 1 and line.has_latents:
        yield (
            f"disk_path: one of {ranks} ranks writes this model's KV (MLA) and all read it, but a folder on the disk belongs "
            "to one rank; use remote_url only"
        )
    if draft := reply.get("draft"):
        yield (
            f"with {draft}, the draft model has a KV pool of its own, which SGLang registers after the storage backend; "
            "attach kvoffload at run time, or use no such draft model"
        )


def _has_latents(line: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    """Return whether the model's `config.json` can be read and has the size of MLA's latent."""
    if line.model_path is None:
        return False
    with suppress(ModelUnread):
        raw = read_model_file(line.model_path, line.revision or "main", environ)
        return any(isinstance(one, dict) and one.get("kv_lora_rank") for one in (raw, raw.get("text_config")))
    return False


def _version(_: Setup) -> Finding:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return unknown("SGLang is not installed in this environment", "run the doctor where SGLang is")
    if version.split("+")[0] != _RUN:
        return warn(f"SGLang {version} was never run with kvoffload", f"try it first: {_RUN} was run")
    return ok(f"SGLang {version}")


VERSION = Check("sglang version", _version)
