"""Reads a model's `config.json` from the model's folder or the Hugging Face cache. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.model.config import size_text
from kvoffload.model.errors import KVOffloadError

_LARGEST = 16 << 20  # in bytes; published files with many labels have 3 MB
_LONGEST_NAME = 200  # the maximum number of characters that an error quotes from a model's name
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelUnread(KVOffloadError):
    """Raised if a model's `config.json` is not on this machine or cannot be read."""


def read_model_file(model: str, revision: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a model's `config.json`, with the quantization if that is in a file of its own.

    Args:
        model: the model's folder, the path of the `config.json`, or the id of a model in the Hugging Face cache.
        revision: the branch, tag or commit to read from the cache.
        environ: the environment variables that say where the cache is.

    Raises:
        ModelUnread: the file is not on this machine, cannot be read or is not a JSON object.
    """
    if "://" in model:
        raise ModelUnread(f"{model[:_LONGEST_NAME]} is not on this machine, and nothing is downloaded")
    path = Path(model)
    try:
        if not path.exists():
            path = _snapshot(model, revision, environ)
        path = path / "config.json" if path.is_dir() else path
        raw = _read_json(path)
    except OSError as error:
        raise ModelUnread(f"{str(path)[:_LONGEST_NAME]} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnread(f"{str(path)[:_LONGEST_NAME]} cannot be used: {error}") from error
    quantization = path.with_name("hf_quant_config.json")
    if not raw.get("quantization_config") and quantization.exists():
        try:
            raw["quantization_config"] = _read_json(quantization)
        except (OSError, ValueError, RecursionError, ModelUnread) as error:
            raw["quantization_config"] = {"kv_cache_is_unread": str(error)}
    return raw


def _snapshot(model: str, revision: str, environ: Mapping[str, str]) -> Path:
    """Return the folder with a model's snapshot in the Hugging Face cache."""
    if not _HUB_ID.fullmatch(model) or ".." in model:
        raise ModelUnread(
            f"{model[:_LONGEST_NAME]} is not on this machine, and is not an id such as Qwen/Qwen3-8B"
        )
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    repository = hub / f"models--{model.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit
    if not (snapshot / "config.json").exists():
        raise ModelUnread(f"{model} is neither a folder nor, with revision {revision}, in {hub}")
    return snapshot


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. As in engines, numbers may be Infinity and NaN."""
    if not path.is_file():  # reading from a pipe or a device may never end
        raise ModelUnread(f"{path} is missing, or not a regular file")
    with path.open("rb") as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ModelUnread(f"{path} is larger than {size_text(_LARGEST)}")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ModelUnread(f"{path} does not hold a JSON object")
    return found
