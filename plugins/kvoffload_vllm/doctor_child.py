"""Gives a command line to vLLM's own parser and configuration, in a child process of the doctor.

    {"arguments": [...], "is_lenient": ...}  ─▶  {"version", "values", "transfer", "refused" or "unknown" or the rest}

The child makes no engine, loads no weights and downloads nothing from the Hugging Face hub.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.checks.ask import answer, is_about_the_hub, shortened, words_of, words_of_exit
from kvoffload_vllm.groups import head_replicas
from kvoffload_vllm.model_sizes import CACHE_DTYPES, LARGEST_HEAD
from kvoffload_vllm.register import NAME, register

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VALUES = (
    *("model", "revision", "dtype", "kv_cache_dtype", "kv_cache_memory_bytes", "max_model_len", "block_size"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local"),
)
_ABOUT_US = re.compile(r"kv[ _-]?(connector|transfer|cache manager)|offload|prefix[ -]?cach", re.IGNORECASE)
_NO_FOLDER = "Invalid repository ID or local directory"
"""How vLLM says that a model, such as a draft model, is not on this machine."""


class _Refused(Exception):
    """vLLM refuses the command line."""


def main() -> None:
    answer(lambda request: examine(request["arguments"], is_lenient=request["is_lenient"]))


def examine(arguments: Sequence[str], *, is_lenient: bool = False) -> dict[str, Any]:
    """Return what vLLM makes of the arguments of `vllm serve`.

    Args:
        arguments: the arguments.
        is_lenient: whether to ignore options that vLLM does not have, because another program reads them.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    found: dict[str, Any] = {"version": __version__}
    if not current_platform.device_type:
        return {**found, "unknown": "it finds no device here, and without one it does not read options"}
    try:
        args = _parse(arguments, is_lenient=is_lenient)
        found |= {"values": _values(args), "transfer": _transfer(args.kv_transfer_config)}
        if reason := _model_is_elsewhere(args):
            return {**found, "unknown": reason}
        with _warnings() as warnings:
            config = _config(args)
    except _Refused as error:
        return {**found, "refused": str(error)}
    except Exception as error:  # vLLM and the libraries below it may raise any exception
        if is_about_the_hub(error) or _NO_FOLDER in str(error):
            return {**found, "unknown": f"a file of the model is not on this machine: {words_of(error)}"}
        return {**found, "refused": words_of(error)}
    return {**found, **_findings(config), "warnings": warnings}


def _parse(arguments: Sequence[str], *, is_lenient: bool) -> argparse.Namespace:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Lenient(FlexibleArgumentParser):  # type: ignore[misc]  # the type checker runs without vLLM
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401
            return super().parse_known_args(args, namespace)[0], []

    parser = (Lenient if is_lenient else FlexibleArgumentParser)(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            args = parser.parse_args(["serve", *arguments])
        except SystemExit as end:
            raise _Refused(words_of_exit(end, said.getvalue())) from end
    args.model = getattr(args, "model_tag", None) or args.model
    return argparse.Namespace(**vars(args))


def _values(args: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in _VALUES}
    plain = {name: value for name, value in values.items() if isinstance(value, (str, int))}
    if plain.get("max_model_len") == -1:
        plain["max_model_len"] = 0
    return plain


def _transfer(config: Any) -> dict[str, Any] | None:  # noqa: ANN401  # vLLM's KVTransferConfig
    if config is None:
        return None
    names = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config")
    # vLLM changes the object later, so this is a copy.
    return {name: copy.deepcopy(getattr(config, name, None)) for name in names}


def _model_is_elsewhere(args: argparse.Namespace) -> str | None:
    """Return why the model's configuration is not on this machine, or None if it is."""
    from huggingface_hub import try_to_load_from_cache

    if Path(args.model).exists():
        return None
    with contextlib.suppress(ValueError):  # not the form of an id
        for name in ("config.json", "params.json"):
            cache = {"revision": args.revision, "cache_dir": args.download_dir}
            if isinstance(try_to_load_from_cache(args.model, name, **cache), str):
                return None
    return f"the configuration of {args.model} is not on this machine"


def _config(args: argparse.Namespace) -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect vLLM's warnings that concern connectors, offloading or prefix caching."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if _ABOUT_US.search(text := record.getMessage()) and shortened(text) not in found:
                found.append(shortened(text))

    handler = Handler(logging.WARNING)
    theirs = logging.getLogger("vllm")
    theirs.addHandler(handler)
    try:
        yield found
    finally:
        theirs.removeHandler(handler)


def _findings(config: VllmConfig) -> dict[str, Any]:
    from kvoffload_vllm import kv_identity

    transfer = config.kv_transfer_config
    speculation: Any = config.speculative_config
    draft = getattr(speculation, "draft_model_config", None)
    has_draft = (
        draft is not None and draft is not config.model_config
    )  # n-grams have the model itself as draft
    return {
        "connector": None if transfer is None else transfer.kv_connector,
        "problems": [*_problems(config)],
        "tier_problems": kv_identity.find_problems(config, has_identity=False),
        "tier_problems_with_weights_id": kv_identity.find_problems(config, has_identity=True),
        "hash_algorithm": config.cache_config.prefix_caching_hash_algo,
        "drafts": None if speculation is None else speculation.method,
        "sizes": _sizes(config, has_draft=has_draft),
    }


def _problems(config: VllmConfig) -> Iterator[str]:
    """Yield the reasons why kvoffload would refuse to start with this configuration."""
    from vllm import __version__

    from kvoffload_vllm.support import config_problems, find_features
    from kvoffload_vllm.tier_entry import find_tier, has_tiers

    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == NAME:
        yield from _unloadable(transfer)
    if transfer is None or find_tier([vars(transfer)]) is None:
        yield from config_problems(config, find_features())
    elif has_tiers(__version__):
        from kvoffload_vllm.secondary_tier import lora_problems

        yield from lora_problems(config)


def _unloadable(transfer: Any) -> Iterator[str]:  # noqa: ANN401  # vLLM's KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()  # whether vLLM would find the entry point is another check
    try:
        KVConnectorFactory.get_connector_class(transfer)
    except Exception as error:  # the connector's import may fail in any way
        yield f"the connector cannot be loaded: {words_of(error)}"


def _sizes(config: VllmConfig, *, has_draft: bool) -> dict[str, Any]:
    """Return the sizes of KV blocks that follow from vLLM's configuration, or in the key "unknown" why none do."""
    model, cache = config.model_config, config.cache_config
    if reason := _size_depends_on(config, has_draft=has_draft):
        return {"unknown": f"the sizes of {model.model} depend on {reason}"}
    item = CACHE_DTYPES.get(cache.cache_dtype, model.dtype.itemsize)
    heads = model.get_num_kv_heads(config.parallel_config)
    width = model.get_head_size()
    parts = 1 if model.use_mla else 2  # the latent, or K and V
    return {
        "page_bytes": parts * heads * width * item * cache.block_size,
        "pages": model.get_num_layers(config.parallel_config),
        "tokens": cache.block_size * config.parallel_config.decode_context_parallel_size,
        "replicas": _replicas(config),
        "calculation": f"{parts} x {heads} x {width} x {item} bytes x {cache.block_size} tokens, by vLLM's configuration",
    }


def _replicas(config: VllmConfig) -> int:
    """Return how many ranks of tensor parallelism have the same KV."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return 1
    return parallel.tensor_parallel_size if config.model_config.use_mla else head_replicas(config)


def _size_depends_on(config: VllmConfig, *, has_draft: bool) -> str | None:
    """Return what the sizes of KV blocks depend on besides the values that `_sizes` uses; None if on nothing."""
    model, cache, text = config.model_config, config.cache_config, config.model_config.hf_text_config
    stages = config.parallel_config.pipeline_parallel_size
    layers = getattr(text, "num_hidden_layers", 0)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "attention"}
    of_layers = (
        *("index_topk", "num_kv_shared_layers", "attention_chunk_size", "cross_attention_layers"),
        *("block_configs", "hybrid_layer_pattern", "v_channels"),
    )
    value_width = None if model.use_mla else getattr(text, "v_head_dim", None)
    window = getattr(text, "use_sliding_window", True) and model.get_sliding_window()
    reasons = {
        "a draft model": has_draft,
        "a model that is not a plain decoder": model.attn_type != "decoder",
        "layers of other kinds than full attention": bool(kinds or window),
        "layers with further caches, or of several sizes": any(
            getattr(text, name, None) for name in of_layers
        ),
        "heads whose K and V differ in size": value_width not in (None, model.get_head_size()),
        "another model's KV cache": not (
            model.get_head_size() and model.get_num_layers(config.parallel_config)
        ),
        f"the dtype {cache.cache_dtype}": cache.cache_dtype not in ("auto", *CACHE_DTYPES),
        "layers of several dtypes": bool(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "the division of layers between stages": layers % stages or "VLLM_PP_LAYER_PARTITION" in os.environ,
        "the block size, which vLLM chooses by the GPU (give --block-size)": _chooses_block_size(config),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _chooses_block_size(config: VllmConfig) -> bool:
    model, cache = config.model_config, config.cache_config
    if getattr(cache, "user_specified_block_size", True):
        return False
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return bool(model.use_mla or model.get_head_size() > LARGEST_HEAD or backend is not None)


if __name__ == "__main__":
    main()
