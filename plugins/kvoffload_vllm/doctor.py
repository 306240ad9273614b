"""The doctor's checks before a vLLM starts. It does not import vLLM, which takes seconds."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffload.checks.check import (
    Check,
    Finding,
    Setup,
    Sizes,
    concluded,
    go,
    no_go,
    not_known,
    warn,
)
from kvoffload.checks.json_option import read_object
from kvoffload.checks.machine import Machine
from kvoffload.checks.software import entry_point_problem, version_numbers
from kvoffload.model.config import parse_bytes, size_text
from kvoffload_vllm.model_sizes import CACHE_DTYPES, DTYPES, Estimate, Options, SizesNotKnown, estimate
from kvoffload_vllm.register import NAME
from kvoffload_vllm.support import NEEDED, NEWEST_RUN, VERSIONS

HELP = "vLLM"

_GROUP, _ENTRY, _VALUE = "vllm.general_plugins", "kvoffload", "kvoffload_vllm.register:register"
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_OPTION = "--kv-transfer-config"
RECOMPUTE = "recompute"
"""vLLM's policy under which no request fails because its load failed."""

_HASHES = ("sha256", "sha256_cbor")
"""vLLM's hash algorithms for which nobody can find two prompts with one hash."""

_RECOMPUTE = f'"kv_load_failure_policy":"{RECOMPUTE}"'


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add options of vLLM, by vLLM's own names."""
    add = group.add_argument
    add(_OPTION, metavar="JSON", help="as vLLM will get it: a JSON object, or a file that holds one")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="as vLLM will get it; without it vLLM decides by the model",
    )
    add(
        "--model",
        metavar="DIR",
        type=Path,
        help="the model's folder, whose config.json gives the sizes of blocks",
    )
    default = Options()
    add("--tensor-parallel-size", "-tp", metavar="N", type=_positive, default=default.tensor_parallel_size,
        help="ranks that share the model")  # fmt: skip
    add(
        "--block-size", metavar="TOKENS", type=_positive, default=default.block_size, help="tokens of a block"
    )
    add(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        metavar="DTYPE",
        default=default.kv_cache_dtype,
        help=f"dtype of the KV cache: {', '.join(CACHE_DTYPES)}",
    )
    add(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        default=default.dtype,
        help=f"dtype of the model: {', '.join(DTYPES)}",
    )
    add(
        "--device-memory",
        metavar="BYTES",
        type=_size,
        help="memory of one GPU, to estimate the device's blocks",
    )
    add("--gpu-memory-utilization", metavar="SHARE", type=_share, default=0.92, help="vLLM's share of it")
    add("--max-model-len", metavar="TOKENS", type=_positive, help="the longest request")
    add(
        "--state-block-tokens",
        type=int,
        metavar="N",
        help="tokens of a block of a model with recurrent layers; vLLM logs at its start to what it sets them",
    )
    add(
        "--prefix-caching-hash-algo",
        metavar="NAME",
        default=_HASHES[0],
        help="as vLLM will get it: how it hashes blocks",
    )
    add("--prefix-cache-retention-interval", type=int, default=0, metavar="N", help="as vLLM will get it")


def find_settings(args: argparse.Namespace) -> Mapping[str, object] | None:
    """Return the connector's `kv_connector_extra_config`, None without --kv-transfer-config.

    Raises:
        ConfigError: the option holds no JSON object.
    """
    if args.kv_transfer_config is None:
        return None
    ours = _connector(read_object(args.kv_transfer_config, _OPTION))
    settings = (ours or {}).get("kv_connector_extra_config") or {}
    return settings if isinstance(settings, dict) else {"kv_connector_extra_config": settings}


def find_sizes(args: argparse.Namespace) -> Sizes | None:
    """Return the sizes of the model's blocks, and the estimate of their number; None without a model.

    Raises:
        ConfigError: the model's files cannot be read, or do not hold what they must.
    """
    if args.model is None:
        return None
    try:
        found = _estimate(args)
    except SizesNotKnown:
        return Sizes(ranks=args.tensor_parallel_size, block_tokens=args.block_size)
    return Sizes(
        ranks=args.tensor_parallel_size,
        block_bytes=found.kv.block_bytes,
        page_bytes=(found.kv.page_bytes,) * found.kv.pages,
        device_blocks=found.blocks,
        block_tokens=args.block_size,
    )


def checks(args: argparse.Namespace) -> Sequence[Check]:
    """Return the checks of the installed vLLM and of the options given."""
    transfer = None
    if args.kv_transfer_config is not None:
        transfer = read_object(args.kv_transfer_config, _OPTION)
    return (
        Check("vllm version", _version),
        Check("vllm plugin", _registration),
        concluded("vllm connector", _transfer(transfer)),
        load_failures(None if transfer is None else transfer.get("kv_load_failure_policy") or "fail"),
        concluded("prefix caching", _prefix_caching(args.enable_prefix_caching)),
        block_hashes(args.prefix_caching_hash_algo),
        Check("model sizes", lambda setup, _: _model_sizes(args, setup)),
        *_states(args.state_block_tokens, args.prefix_cache_retention_interval),
    )


def _states(block_tokens: int | None, interval: int | None) -> Iterator[Check]:
    """Only models with recurrent layers have such blocks."""
    if block_tokens is not None:
        yield recurrent_states(block_tokens, interval)


def recurrent_states(block_tokens: int, interval: int | None) -> Check:
    """Return the check of where vLLM keeps recurrent states.

    Args:
        block_tokens: tokens of a block of a model with recurrent layers.
        interval: vLLM's `prefix_cache_retention_interval`: 0 keeps the state at a prompt's last end of a block, None
            those at all ends.
    """
    return concluded("recurrent states", _recurrent_states(block_tokens, interval))


def _recurrent_states(block_tokens: int, interval: int | None) -> Finding:
    text = f"hits of this model end at multiples of {block_tokens} tokens; shorter prefixes are never found"
    if interval == 0:
        return warn(
            f"{text}, and vLLM keeps the state at the last of them in a prompt alone",
            f"for long conversations start vLLM with --prefix-cache-retention-interval {block_tokens}, or a multiple: it "
            "keeps more states, which takes more host memory",
        )
    return go(text)


def block_hashes(algorithm: str) -> Check:
    """Return the check of vLLM's hash algorithm, `prefix_caching_hash_algo`."""
    return Check("block hashes", lambda setup, _: _block_hashes(algorithm, setup))


def _block_hashes(algorithm: str, setup: Setup) -> Finding:
    config = setup.config
    if algorithm in _HASHES:
        return go(f"blocks are found by {algorithm}")
    if config is not None and config.disk_path is None and config.remote_url is None:
        return go(f"blocks are found by {algorithm}, and no later process finds them")
    return warn(
        f"blocks below the host are found by {algorithm}, for which prompts with equal hashes can be searched: a tenant who "
        "finds some can have KV of one served for the other, also by other engines and after a restart",
        f"start vLLM with --prefix-caching-hash-algo {_HASHES[0]}",
    )


def load_failures(policy: object) -> Check:
    """Return the check of vLLM's policy for failed loads; `policy` is None if it is not known."""
    return Check("load failures", lambda setup, _: _load_failures(policy, setup))


def _load_failures(policy: object, setup: Setup) -> Finding:
    if policy is None:
        return not_known("what vLLM does when a load fails", f"give {_OPTION}, with {_RECOMPUTE}")
    if policy == RECOMPUTE:
        return go("vLLM recomputes what fails to load")
    verify = setup.config.verify if setup.config is not None else "off"
    refused = f"; with verify {verify!r} the connector refuses to start" if verify != "off" else ""
    return no_go(
        f"kv_load_failure_policy is {str(policy)[:40]!r}: vLLM fails every request whose load fails{refused}",
        f"set {_RECOMPUTE} at the top level of {_OPTION}; vLLM does not read it in an entry of a MultiConnector",
    )


def _version(_: Setup, machine: Machine) -> Finding:
    version = machine.version("vllm")
    if version is None:
        return not_known("vLLM is not installed in this environment", "run the doctor where vLLM is")
    text = f"vLLM {version}"
    source = machine.source("vllm", _BASE)
    if source is None:
        return warn(
            f"{text}: what it offers to connectors cannot be read", f"the connector works with {VERSIONS}"
        )
    lacks = [name for name in NEEDED if not re.search(rf"\bdef {name}\b", source)]
    if lacks:
        return no_go(f"{text} lacks {', '.join(lacks)}", f"the connector works with {VERSIONS}")
    if version_numbers(version)[:2] > NEWEST_RUN:
        return warn(
            f"{text} is newer than any that was run", f"the connector works with {VERSIONS}; try it first"
        )
    return go(f"{text} has what the connector needs")


def _registration(_: Setup, machine: Machine) -> Finding:
    problem = entry_point_problem(machine, _GROUP, _ENTRY, _VALUE)
    if problem:
        return no_go(problem, "pip install kvoffload, in the environment of vLLM")
    allowed = machine.environ.get("VLLM_PLUGINS")
    if allowed is not None and _ENTRY not in allowed.split(","):
        return no_go(
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load {_ENTRY!r}",
            f"add {_ENTRY} to it, or unset it",
        )
    return go(f"vLLM will find the connector by the entry point {_ENTRY!r} of {_GROUP}")


def _transfer(transfer: dict[str, Any] | None) -> Finding:
    if transfer is None:
        return not_known("the connector that vLLM will use", f"give {_OPTION}, as vLLM will get it")
    ours = _connector(transfer)
    if ours is None:
        return no_go(
            f"kv_connector is {str(transfer.get('kv_connector'))[:80]!r}, not {NAME}",
            f'set "kv_connector":"{NAME}"',
        )
    role = ours.get("kv_role")
    if role != "kv_both":
        given = "is not given" if role is None else f"is {str(role)[:40]!r}"
        return no_go(f"kv_role {given}: the connector refuses to start", 'set "kv_role":"kv_both"')
    return go(f"vLLM will use {NAME}")


def _connector(transfer: dict[str, Any]) -> dict[str, Any] | None:
    """Return our connector's configuration, which may be an entry of a MultiConnector."""
    if transfer.get("kv_connector") == NAME:
        return transfer
    extra = transfer.get("kv_connector_extra_config")
    several = extra.get("connectors") if isinstance(extra, dict) else None
    for one in several if isinstance(several, list) else ():
        if isinstance(one, dict) and one.get("kv_connector") == NAME:
            return one
    return None


def _prefix_caching(given: bool | None) -> Finding:
    if given is None:
        return not_known(
            "whether prefix caching is on; by default vLLM decides by the model, and the connector refuses to start "
            "without it",
            "start vLLM with --enable-prefix-caching",
        )
    if given:
        return go("prefix caching is on")
    return no_go(
        "prefix caching is off, and blocks are found by their prefix: the connector refuses to start",
        "start vLLM with --enable-prefix-caching",
    )


def _model_sizes(args: argparse.Namespace, setup: Setup) -> Finding:
    is_given = bool(setup.block_bytes and setup.page_bytes and setup.device_blocks)
    try:
        found = _estimate(args) if args.model is not None else None
    except SizesNotKnown as error:
        return _given_sizes(
            is_given, str(error), "vLLM's start logs the sizes; give them by --block-bytes and the like"
        )
    if found is None:
        return _given_sizes(
            is_given, "the sizes of the model's blocks", "give --model, and vLLM's options that change them"
        )
    kv = found.kv
    text = (
        f"pages of {size_text(kv.page_bytes)} ({kv.about}), {kv.pages} of them in a block: {size_text(kv.block_bytes)} a block "
        f"and rank"
    )
    if found.blocks is None:
        return go(f"{text}; with --device-memory, the device's blocks can be estimated")
    text += f"; device: {found.about}: at most {found.blocks:,} blocks"
    needed = kv.full_groups * -(-args.max_model_len // kv.block_tokens) if args.max_model_len else 0
    if found.blocks < max(needed, 1):
        return no_go(
            f"{text}; one request of {args.max_model_len or 1:,} tokens needs {needed:,}",
            "more memory, more ranks, a smaller --max-model-len or a smaller --kv-cache-dtype",
        )
    if args.max_model_len:
        text += f"; one request of {args.max_model_len:,} tokens needs {needed:,} of them"
    return go(text)


def _given_sizes(is_given: bool, unknown: str, remedy: str) -> Finding:
    return go("the sizes are given as the engine reports them") if is_given else not_known(unknown, remedy)


def _estimate(args: argparse.Namespace) -> Estimate:
    options = Options(args.tensor_parallel_size, args.block_size, args.kv_cache_dtype, args.dtype)
    return estimate(args.model, options, args.device_memory, args.gpu_memory_utilization)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _size(text: str) -> int:
    return parse_bytes(int(text) if text.isdecimal() else text)


def _share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number
