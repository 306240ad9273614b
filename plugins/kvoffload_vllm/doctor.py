"""The doctor's checks for vLLM, run before and during its start. They never import vLLM, which would take seconds."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvoffload.checks.check import Check, Finding, Given, Setup, Sizes, go, no_go, not_known, warn
from kvoffload.checks.json_option import read_object
from kvoffload.model.config import parse_bytes
from kvoffload_vllm.model_sizes import CACHE_DTYPES, Options, SizesNotKnown, kv_sizes, read_config
from kvoffload_vllm.register import NAME
from kvoffload_vllm.support import NEWEST_RUN, VERSIONS, role_problems

HELP = "vLLM"

RECOMPUTE = "recompute"
"""vLLM's policy for failed loads that recomputes the tokens instead of failing the request."""

_GROUP, _ENTRY = "vllm.general_plugins", "kvoffload"
_OPTION = "--kv-transfer-config"
_HASHES = ("sha256", "sha256_cbor")  # finding two prompts with the same hash is infeasible
_BY_HAND = "--block-bytes and --device-blocks"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add options that have vLLM's own names, and options for the sizes that vLLM logs at its start."""
    add, default = group.add_argument, Options()
    add(_OPTION, metavar="JSON", help="as vLLM will get it: a JSON object, or a file that holds one")
    add("--model", metavar="DIR", type=Path, help="the model's folder; its config.json gives the sizes")
    add("--tensor-parallel-size", "-tp", metavar="N", type=_positive, default=default.tensor_parallel_size,
        help="ranks that share the model")  # fmt: skip
    add(
        "--block-size", metavar="TOKENS", type=_positive, default=default.block_size, help="tokens of a block"
    )
    add("--kv-cache-dtype", choices=CACHE_DTYPES, metavar="DTYPE", default=default.kv_cache_dtype,
        help=f"dtype of the KV cache: {', '.join(CACHE_DTYPES)}")  # fmt: skip
    add("--kv-cache-memory-bytes", metavar="BYTES", type=_size,
        help="memory of one GPU's KV cache, as vLLM's start logs it")  # fmt: skip
    add("--block-bytes", metavar="BYTES", type=_size,
        help="one rank's bytes of one block in all layers, where --model does not give them")  # fmt: skip
    add(
        "--device-blocks",
        metavar="N",
        type=_positive,
        help="blocks of the device's KV cache, instead of an estimate",
    )


def read_arguments(args: argparse.Namespace) -> Given:
    """Return the settings, sizes and checks that the command line's options give for vLLM.

    Raises:
        ConfigError: the connector's configuration or the model's `config.json` cannot be read or is invalid.
    """
    transfer = None if args.kv_transfer_config is None else read_object(args.kv_transfer_config, _OPTION)
    connector, sizes, about = _transfer(transfer), *_sizes(args)
    policy = None if transfer is None else transfer.get("kv_load_failure_policy") or "fail"
    checks = (
        Check("vllm version", _version),
        Check("vllm plugin", _registration),
        Check("vllm connector", lambda *_: connector),
        load_failures(policy),
        Check("model sizes", lambda *_: about),
    )
    return Given(None if transfer is None else _settings(transfer), sizes, checks)


def recurrent_states(block_tokens: int, interval: int | None) -> Check:
    """Return a check that reports which recurrent states vLLM keeps.

    Args:
        block_tokens: tokens in one block of a model with recurrent layers.
        interval: vLLM's `prefix_cache_retention_interval`: 0 keeps only the state at a prompt's last block boundary,
            None keeps the states at all block boundaries.
    """
    text = f"hits of this model end at multiples of {block_tokens} tokens; shorter prefixes are never found"
    finding = go(text)
    if interval == 0:
        finding = warn(
            f"{text}, and vLLM keeps only the state at the last of them in a prompt",
            f"for long conversations start vLLM with --prefix-cache-retention-interval {block_tokens}, or a multiple: it "
            "keeps more states, which takes more host memory",
        )
    return Check("recurrent states", lambda *_: finding)


def block_hashes(algorithm: str) -> Check:
    """Return the check of vLLM's `prefix_caching_hash_algo`. It is needed only with a tier below the host."""
    finding = go(f"blocks are found by {algorithm}")
    if algorithm not in _HASHES:
        finding = warn(
            f"blocks below the host are found by {algorithm}, for which prompts with equal hashes can be searched: a tenant "
            "who finds some can have KV of one served for the other, also by other engines and after a restart",
            f"start vLLM with --prefix-caching-hash-algo {_HASHES[0]}",
        )
    return Check("block hashes", lambda *_: finding)


def load_failures(policy: object) -> Check:
    """Return the check of vLLM's policy for failed loads; `policy` is None if it is unknown."""

    def find(setup: Setup) -> Finding:
        if policy is None:
            return not_known("what vLLM does when a load fails", f"give {_OPTION}")
        if policy == RECOMPUTE:
            return go("vLLM recomputes what fails to load")
        verify = setup.config.verify
        refused = f"; with verify {verify!r} the connector refuses to start" if verify != "off" else ""
        return no_go(
            f"kv_load_failure_policy is {str(policy)[:40]!r}: vLLM fails every request whose load fails{refused}",
            f'set "kv_load_failure_policy":"{RECOMPUTE}" at the top level of {_OPTION}; vLLM does not read it in an entry '
            "of a MultiConnector",
        )

    return Check("load failures", find)


def _version(_: Setup) -> Finding:
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return not_known("vLLM is not installed in this environment", "run the doctor where vLLM is")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) > NEWEST_RUN:
        return warn(f"vLLM {version} is newer than any that was run", f"try it first: {VERSIONS}")
    return go(f"vLLM {version}; the connector works with {VERSIONS}")


def _registration(_: Setup) -> Finding:
    if not metadata.entry_points(group=_GROUP, name=_ENTRY):
        return no_go(
            f"the entry point {_ENTRY!r} of {_GROUP} is not registered in this environment",
            "install kvoffload in the environment of vLLM",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _ENTRY not in allowed.split(","):
        return no_go(
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load {_ENTRY!r}",
            f"add {_ENTRY} to it, or unset it",
        )
    return go(f"vLLM will find the connector by the entry point {_ENTRY!r} of {_GROUP}")


def _transfer(transfer: dict[str, Any] | None) -> Finding:
    if transfer is None:
        return not_known("the connector that vLLM will use", f"give {_OPTION}")
    ours = _connector(transfer)
    if ours is None:
        return no_go(
            f"kv_connector is {str(transfer.get('kv_connector'))[:80]!r}, not {NAME}",
            f'set "kv_connector":"{NAME}"',
        )
    if problems := list(role_problems(ours.get("kv_role"))):
        return no_go(problems[0], 'set "kv_role":"kv_both"')
    return go(f"vLLM will use {NAME}")


def _connector(transfer: dict[str, Any]) -> dict[str, Any] | None:
    """Return our connector's configuration, which may be an entry of a MultiConnector; None if there is none."""
    extra = transfer.get("kv_connector_extra_config")
    several = extra.get("connectors") if isinstance(extra, dict) else None
    entries = (transfer, *(several if isinstance(several, list) else ()))
    return next((one for one in entries if isinstance(one, dict) and one.get("kv_connector") == NAME), None)


def _settings(transfer: dict[str, Any]) -> Mapping[str, object]:
    settings = (_connector(transfer) or {}).get("kv_connector_extra_config") or {}
    return settings if isinstance(settings, dict) else {"kv_connector_extra_config": settings}


def _sizes(args: argparse.Namespace) -> tuple[Sizes, Finding]:
    """Return the sizes and the finding about them. Sizes given as options override those computed from the model."""
    ranks = args.tensor_parallel_size
    sizes = Sizes(ranks, args.block_bytes, (), args.device_blocks)
    by_hand = go("given as vLLM's start logs them") if sizes.block_bytes and sizes.device_blocks else None
    unknown = "the sizes of the model's blocks"
    if args.model is None:
        remedy = f"give --model and --kv-cache-memory-bytes, or {_BY_HAND}"
        return sizes, by_hand or not_known(unknown, remedy)
    try:
        found = kv_sizes(read_config(args.model), Options(ranks, args.block_size, args.kv_cache_dtype))
    except SizesNotKnown as error:
        return sizes, by_hand or not_known(unknown, f"{error}; give {_BY_HAND}, which vLLM's start logs")
    if by_hand is not None:
        return sizes, by_hand
    pages = (found.page_bytes,) * found.pages if sizes.block_bytes is None else ()
    block_bytes = sizes.block_bytes or found.block_bytes
    memory: int | None = args.kv_cache_memory_bytes
    fitting = None if memory is None else memory // block_bytes
    about = found.about if fitting is None else f"{found.about}; {fitting:,} blocks fit the KV cache"
    return Sizes(ranks, block_bytes, pages, sizes.device_blocks or fitting), go(about)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _size(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GiB") from None
