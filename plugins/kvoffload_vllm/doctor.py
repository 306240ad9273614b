"""The doctor's checks for vLLM. The connector also runs some of the checks when vLLM starts.

This module does not import vLLM, because the import takes seconds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any, Literal

from kvoffload.checks.ask import ask_engine
from kvoffload.checks.check import GIVE, Check, Finding, Given, Setup, Sizes, fail, ok, unknown, warn
from kvoffload.checks.launch import Launch, find_launch
from kvoffload.checks.model_file import ModelUnread, read_model_file
from kvoffload.checks.options import positive, read_object, size
from kvoffload.model.errors import ConfigError
from kvoffload_vllm.command_line import (
    CHANGE_SIZES,
    CHOOSE_BLOCKS,
    COMMANDS,
    DYNAMO,
    EXAMPLE,
    number,
    read_line,
)
from kvoffload_vllm.line_checks import options_check
from kvoffload_vllm.model_sizes import (
    ModelSizes,
    Options,
    SizesNotKnown,
    kv_sizes,
    read_config,
    sizes_of,
)
from kvoffload_vllm.register import NAME
from kvoffload_vllm.support import RUN, VERSIONS, release_of, role_problems
from kvoffload_vllm.tier_entry import find_tier, has_tiers, parse_tier, tier_entry_problems, tier_settings

HELP = "vLLM"

RECOMPUTE = "recompute"
"""The value of `kv_load_failure_policy` with which vLLM recomputes the tokens of a failed load."""

_GROUP, _ENTRY = "vllm.general_plugins", "kvoffload"
_OPTION = "--kv-transfer-config"
_HASHES = ("sha256", "sha256_cbor")  # constructing two prompts with the same SHA-256 hash is infeasible
_BY_HAND = "--block-bytes and --device-blocks"


@dataclass(frozen=True)
class _Start:
    """What is known of vLLM's start besides the values of options.

    Args:
        launch: the start; without arguments if there is no command line.
        names: the names of all options in the command line.
        known_sizes: the sizes of KV blocks that vLLM's configuration determines.
    """

    launch: Launch = Launch(())  # noqa: RUF009  # a constant: `Launch` is frozen
    names: frozenset[str] = frozenset()
    known_sizes: Mapping[str, Any] = field(default_factory=dict)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the vLLM options that the checks read, and `--block-bytes`, which a user reads from vLLM's log."""
    _add_options(group.add_argument)
    group.add_argument("--block-bytes", metavar="BYTES", type=size, help="a block's bytes on one rank")


def _add_options(add: Callable[..., object]) -> None:
    add(_OPTION, metavar="JSON", help="a JSON object, or a file that holds one")
    add("--model", help="folder, or id in the Hugging Face cache; its config.json gives the sizes")
    add("--revision", help="revision of an id (default: main)")
    add("--kv-cache-dtype", metavar="DTYPE", help="dtype of the KV cache (default: auto)")
    add("--dtype", help="dtype of the model (default: auto)")
    add("--kv-cache-memory-bytes", metavar="BYTES", type=number, help="one GPU's, as vLLM's start logs it")
    add("--max-model-len", metavar="N", type=number, help="tokens of the longest request")
    add = partial(add, metavar="N", type=positive)
    add("--tensor-parallel-size", "-tp", help="ranks that share a layer (default: 1)")
    add("--pipeline-parallel-size", "-pp", help="ranks that share the layers (default: 1)")
    add("--data-parallel-size", "-dp", help="engines (default: 1)")
    add("--data-parallel-size-local", "-dpl", help="engines on this machine (default: all)")
    add("--block-size", help="tokens of a block (default: vLLM's usual size)")
    add("--device-blocks", "--num-gpu-blocks-override", help="blocks of the device's KV cache")


def read_arguments(args: argparse.Namespace) -> Given:
    """Return the settings, sizes and checks that the doctor's options and vLLM's command line determine.

    Raises:
        ConfigError: the doctor's own `--kv-transfer-config` is not a JSON object.
    """
    transfer = None if args.kv_transfer_config is None else read_object(args.kv_transfer_config, _OPTION)
    if not args.command_line:
        return _given(args, transfer, unknown("the connector that vLLM will use", GIVE), _Start())
    try:
        launch = find_launch(args.command_line, COMMANDS, EXAMPLE)
    except ConfigError as error:
        finding = fail(str(error), f"give a command line such as: {EXAMPLE}")
        missing = unknown(f"{_OPTION}: the command line cannot be read", finding.remedy)
        given = _given(args, transfer, missing, _Start())
        unread = missing if transfer is None else None
        return replace(given, checks=(*given.checks, Check("vllm options", lambda _: finding)), unread=unread)
    return _given_by_line(args, transfer, launch)


def _given_by_line(args: argparse.Namespace, transfer: dict[str, Any] | None, launch: Launch) -> Given:
    """Return what vLLM's command line determines. The doctor's own options, and `transfer`, take precedence."""
    line = read_line(launch)
    is_lenient = launch.command == DYNAMO
    reply = ask_engine("vLLM", launch, "kvoffload_vllm.doctor_child", is_lenient=is_lenient)
    values = line.values | reply.get("values", {})
    args = argparse.Namespace(**vars(args) | {k: v for k, v in values.items() if vars(args).get(k) is None})
    transfer = transfer or reply.get("transfer") or line.transfer
    missing = fail(f"the command line has no {_OPTION}", "add what `kvoffload vllm-args` prints")
    unread = None
    if transfer is None and "values" not in reply and (reasons := [*line.unread, *line.problems]):
        unread = missing = unknown(f"{_OPTION}: {'; '.join(reasons)}", reply.get("remedy", ""))
    entries = [] if transfer is None else [*_entries(transfer)]
    options = options_check(
        line,
        launch,
        reply,
        is_ours=transfer is not None and _connector(transfer) is not None,
        is_tier=find_tier(entries) is not None,
        is_encoder_decoder=_is_encoder_decoder(args, launch.local_environ),
    )
    algorithm = reply.get("hash_algorithm") or line.values.get("prefix_caching_hash_algo") or _HASHES[0]
    given = _given(args, transfer, missing, _Start(launch, frozenset(line.names), reply.get("sizes", {})))
    return replace(given, checks=(*given.checks, options, block_hashes(algorithm)), unread=unread)


def _given(
    args: argparse.Namespace, transfer: dict[str, Any] | None, missing: Finding, start: _Start
) -> Given:
    """Return what the connector's configuration and the sizes determine.

    Args:
        args: the doctor's options, and those of vLLM's command line.
        transfer: `--kv-transfer-config`.
        missing: the finding about the connector if `transfer` is None.
        start: vLLM's start.
    """
    version = Check("vllm version", lambda _: _version(start.launch.image))
    sizes, about = _sizes(args, start)
    tier = None if transfer is None else find_tier(_entries(transfer))
    if tier is not None:
        check = Check("vllm connector", lambda _: _tier(*tier, start.launch.image))
        return Given(tier_settings(tier[1]), sizes, (version, check), parse_tier)
    connector = missing if transfer is None else _transfer(transfer)
    policy = None if transfer is None else transfer.get("kv_load_failure_policy") or "fail"
    checks = (
        version,
        Check("vllm plugin", lambda _: _registration(start.launch)),
        Check("vllm connector", lambda _: connector),
        load_failures(policy),
        Check("model sizes", lambda _: about),
    )
    return Given(None if transfer is None else _settings(transfer), sizes, checks)


def recurrent_states(
    block_tokens: int, interval: int | Literal["unknown"] | None, tail_tokens: int = 0
) -> Check:
    """Return a check that warns if vLLM keeps only the last recurrent state of each prompt, or does not say which.

    Args:
        block_tokens: tokens in one block of a model with recurrent layers.
        interval: vLLM's `prefix_cache_retention_interval`, in tokens. With 0, vLLM keeps only the state at a prompt's
            last block boundary. With None, vLLM keeps the states at all block boundaries. "unknown" if this vLLM does
            not have the setting.
        tail_tokens: as in `EngineShape`.
    """
    text = f"hits of this model end at multiples of {block_tokens} tokens; shorter prefixes are never found"
    if tail_tokens:
        text = f"hits of this model end at multiples of {block_tokens} tokens, or at a prompt's last one of {tail_tokens}"
    finding = ok(text)
    if interval == 0:
        finding = warn(
            f"{text}, and vLLM keeps only the state at the last of them in a prompt",
            f"for long conversations start vLLM with --prefix-cache-retention-interval {block_tokens}, or a multiple: it "
            "keeps more states, which takes more host memory",
        )
    if interval == "unknown":
        finding = warn(
            f"{text}, and this vLLM does not say at which of them it keeps the state",
            "compare the tokens found in a second turn with the first turn's prompt",
        )
    return Check("recurrent states", lambda *_: finding)


def block_hashes(algorithm: str) -> Check:
    """Return a check that warns if later processes find blocks by hashes for which collisions can be constructed.

    Args:
        algorithm: vLLM's `prefix_caching_hash_algo`.
    """

    def find(setup: Setup) -> Finding:
        if algorithm in _HASHES or not setup.config.outlives_engine:
            return ok(f"blocks are found by {algorithm}")
        return warn(
            f"blocks that outlive the engine are found by {algorithm}, for which prompts with equal hashes can be searched: a tenant "
            "who finds some can have KV of one served for the other, also by other engines and after a restart",
            f"start vLLM with --prefix-caching-hash-algo {_HASHES[0]}",
        )

    return Check("block hashes", find)


def load_failures(policy: object) -> Check:
    """Return a check that fails unless vLLM recomputes the tokens of failed loads.

    Args:
        policy: vLLM's `kv_load_failure_policy`; None if the doctor does not know the policy.
    """

    def find(setup: Setup) -> Finding:
        if policy is None:
            return unknown("what vLLM does when a load fails", f"give {_OPTION}")
        if policy == RECOMPUTE:
            return ok("vLLM recomputes what fails to load")
        verify = setup.config.verify
        refused = f"; with verify {verify!r} the connector refuses to start" if verify != "off" else ""
        return fail(
            f"kv_load_failure_policy is {str(policy)[:40]!r}: vLLM fails every request whose load fails{refused}",
            f'set "kv_load_failure_policy":"{RECOMPUTE}" at the top level of {_OPTION}; vLLM does not read it in an entry '
            "of a MultiConnector",
        )

    return Check("load failures", find)


def _installed() -> str | None:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def _version(image: str) -> Finding:
    if image:
        return unknown(
            f"vLLM runs in the image {image}",
            f"run the doctor in that image; the connector works with {VERSIONS}",
        )
    if (version := _installed()) is None:
        return unknown("vLLM is not installed in this environment", "run the doctor where vLLM is")
    if release_of(version) > release_of(RUN[-1]):
        return warn(f"vLLM {version} is newer than any that was run", f"try it first: {VERSIONS}")
    return ok(f"vLLM {version}; the connector works with {VERSIONS}")


def _registration(launch: Launch) -> Finding:
    allowed = launch.whole_environ.get("VLLM_PLUGINS")
    if allowed is not None and _ENTRY not in allowed.split(","):
        return fail(
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load {_ENTRY!r}",
            f"add {_ENTRY} to it, or unset it",
        )
    if launch.image:
        return unknown(f"whether kvoffload is in the image {launch.image}", "run the doctor in that image")
    if not metadata.entry_points(group=_GROUP, name=_ENTRY):
        return fail(
            f"the entry point {_ENTRY!r} of {_GROUP} is not registered in this environment",
            "install kvoffload in the environment of vLLM",
        )
    return ok(f"vLLM will find the connector by the entry point {_ENTRY!r} of {_GROUP}")


def _transfer(transfer: dict[str, Any]) -> Finding:
    ours = _connector(transfer)
    if ours is None:
        return fail(
            f"kv_connector is {str(transfer.get('kv_connector'))[:80]!r}, not {NAME}",
            f'set "kv_connector":"{NAME}"',
        )
    if problems := list(role_problems(ours.get("kv_role"))):
        return fail(problems[0], 'set "kv_role":"kv_both"')
    return ok(f"{_OPTION} names {NAME}")


def _tier(connector: Mapping[str, Any], tier: Mapping[str, Any], image: str) -> Finding:
    problems = [*tier_entry_problems(connector, tier)]
    version = None if image else _installed()
    if version is not None and not has_tiers(version):
        problems.append(f"vLLM {version} has no tiers that kvoffload can use; 0.33 and newer have them")
    if problems:
        return fail("; ".join(problems), "see \"Below vLLM's own connector\" in the plugin's README")
    return ok(
        "vLLM's OffloadingConnector with kvoffload's tier below it; host memory is vLLM's, and is not checked"
    )


def _connector(transfer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of `kv_transfer_config` that configures kvoffload's connector; None without such a part."""
    return next((one for one in _entries(transfer) if one.get("kv_connector") == NAME), None)


def _entries(transfer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of `kv_transfer_config` that configure a connector: the whole, and a MultiConnector's entries."""
    extra = transfer.get("kv_connector_extra_config")
    several = extra.get("connectors") if isinstance(extra, dict) else None
    entries = (transfer, *(several if isinstance(several, list) else ()))
    yield from (one for one in entries if isinstance(one, dict))


def _settings(transfer: dict[str, Any]) -> Mapping[str, object] | None:
    """Return kvoffload's settings in `kv_transfer_config`; None if it does not name kvoffload's connector."""
    if (ours := _connector(transfer)) is None:
        return None
    settings = ours.get("kv_connector_extra_config") or {}
    return settings if isinstance(settings, dict) else {"kv_connector_extra_config": settings}


def _sizes(args: argparse.Namespace, start: _Start) -> tuple[Sizes, Finding]:
    """Return the engine's sizes, and a finding that says how the doctor determined the sizes.

    Sizes given as options take precedence over those that vLLM's configuration determines, and these over sizes
    computed from the model's `config.json`.
    """
    stages = args.pipeline_parallel_size or 1
    ranks = (args.tensor_parallel_size or 1) * stages
    engines = args.data_parallel_size_local or args.data_parallel_size or 1
    sizes = Sizes(
        ranks, args.block_bytes, (), args.device_blocks, engines, args.kv_cache_memory_bytes or None
    )
    if sizes.block_bytes and sizes.device_blocks:
        return sizes, ok("given as vLLM's start logs them")
    if args.model is None:
        return sizes, unknown("no MODEL", "put MODEL directly after serve" if args.command_line else GIVE)
    try:
        found = _model_sizes(args, start, ranks // stages, stages)
    except SizesNotKnown as error:
        reason = start.known_sizes.get("unknown", error)
        return sizes, unknown(str(reason), f"give {_BY_HAND}, which vLLM's start logs")
    except ConfigError as error:
        return sizes, fail(str(error), "correct the number of ranks")
    if getattr(args, "distributed_executor_backend", None) in (None, "mp"):
        sizes = replace(sizes, sharers=found.replicas)
    if sizes.block_bytes is None:
        sizes = replace(sizes, block_bytes=found.block_bytes, page_bytes=(found.page_bytes,) * found.pages)
    if sizes.device_blocks is None and sizes.device_bytes:
        sizes = replace(sizes, device_blocks=sizes.device_bytes // (sizes.block_bytes or 1))
    return sizes, _fit(sizes, found, args.max_model_len or 1)


def _fit(sizes: Sizes, model: ModelSizes, longest_tokens: int) -> Finding:
    """Return a finding that fails if the device's KV cache is too small for the longest request."""
    if sizes.device_blocks is None:
        return ok(model.about)
    longest = math.ceil(longest_tokens / model.tokens)
    if longest > sizes.device_blocks:
        return fail(
            f"one request of --max-model-len needs {longest:,} blocks, and {sizes.device_blocks:,} fit the KV cache",
            "raise --kv-cache-memory-bytes, or lower --max-model-len: vLLM would refuse to start",
        )
    return ok(f"{model.about}; {sizes.device_blocks:,} blocks fit the KV cache")


def _is_encoder_decoder(args: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    """Return whether the model's `config.json` can be read and says that the model is an encoder-decoder."""
    if args.model is None:
        return False
    with suppress(ModelUnread):
        return read_model_file(args.model, args.revision or "main", environ).get("is_encoder_decoder") is True
    return False


def _model_sizes(args: argparse.Namespace, start: _Start, ranks: int, stages: int) -> ModelSizes:
    if "page_bytes" in start.known_sizes:
        return sizes_of(**start.known_sizes)
    changing = CHANGE_SIZES if args.block_size else CHANGE_SIZES + CHOOSE_BLOCKS
    if given := [name for name in changing if name in start.names]:
        raise SizesNotKnown(f"sizes with {', '.join(given)} are not computed")
    options = Options(ranks, stages, args.block_size, args.kv_cache_dtype, args.dtype)
    model = read_config(args.model, args.revision or "main", start.launch.local_environ)
    return kv_sizes(model, options)
