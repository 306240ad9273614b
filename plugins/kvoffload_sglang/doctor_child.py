"""Gives a command line to SGLang's own parser and resolution of settings, in a child process of the doctor.

    {"arguments": [...]}  ─▶  {"version", "values", "refused" or "unknown" or the rest}

The child makes no engine, loads no weights and downloads nothing from the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from kvoffload.checks.ask import answer, is_about_the_hub, words_of, words_of_exit

_VALUES = (
    *(
        "enable_hierarchical_cache",
        "hicache_storage_backend",
        "disable_radix_cache",
        "enable_lora",
        "lora_paths",
    ),
    *("load_format", "dp_size", "tp_size", "attn_dp_size", "speculative_algorithm"),
    "hicache_storage_backend_extra_config",
)


def main() -> None:
    answer(lambda request: examine(request["arguments"]))


def examine(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what SGLang makes of the arguments of `sglang.launch_server`."""
    from sglang.srt.server_args import prepare_server_args

    found: dict[str, Any] = {"version": version("sglang")}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = prepare_server_args(list(arguments))
        args.resolve_once()
    except SystemExit as end:
        return {**found, "refused": words_of_exit(end, said.getvalue())}
    except Exception as error:  # SGLang and the libraries below it may raise any exception
        if is_about_the_hub(error):
            return {**found, "unknown": f"a file of the model is not on this machine: {words_of(error)}"}
        return {**found, "refused": words_of(error)}
    settings = args.resolved_dict()
    found |= {"values": {name: settings.get(name) for name in _VALUES}}
    try:
        return {**found, "is_mla": _is_mla(args), "draft": _draft(args, settings)}
    except Exception as error:  # as above
        return {**found, "unknown": f"the model's configuration cannot be read: {words_of(error)}"}


def _is_mla(args: Any) -> bool:  # noqa: ANN401  # SGLang's ServerArgs
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    return bool(ModelConfig.from_server_args(args).attention_arch == AttentionArch.MLA)


def _draft(args: Any, settings: Mapping[str, Any]) -> str | None:  # noqa: ANN401
    """Return the algorithm of a draft model that has a KV pool of its own; None without such a model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    name = settings["speculative_algorithm"]
    algorithm = SpeculativeAlgorithm.from_string(name)
    if algorithm.is_none() or algorithm.is_ngram():
        return None
    if algorithm.is_eagle() and not algorithm.is_eagle3():
        path = settings["speculative_draft_model_path"]
        draft = ModelConfig.from_server_args(args, model_path=path, is_draft_model=True)
        if draft.num_nextn_predict_layers:
            return None  # SGLang packs these layers into the model's own pool
    return str(name)


if __name__ == "__main__":
    main()
