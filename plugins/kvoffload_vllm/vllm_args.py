"""`kvoffload vllm-args`: prints the command-line arguments with which a stock vLLM uses kvoffload.

The arguments include `--enable-prefix-caching`, without which the connector refuses to start. For models without
attention, vLLM's prefix caching is off by default.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping

from kvoffload.checks.options import read_settings
from kvoffload.model.config import ADVICE, ALIASES, PER_RANK, OffloadConfig, parse_config
from kvoffload.model.errors import ConfigError
from kvoffload_vllm.doctor import RECOMPUTE
from kvoffload_vllm.register import NAME

HELP = "print the arguments with which vLLM uses kvoffload"

_FORMS = ("flag", "dotted", "yaml", "python")
_KEY = "kv_connector_extra_config"
_CACHING = "--enable-prefix-caching"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host-bytes", metavar="BYTES", help="host memory of one engine, for all its ranks")
    others = "any other settings: a JSON object, a file that holds one, or KEY=VALUE; may be repeated"
    parser.add_argument("--config", metavar="SETTINGS", action="append", default=[], help=others)
    forms = (
        "flag: JSON in one option; dotted: an option per key; yaml: for vLLM's --config; python: for LLM()"
    )
    parser.add_argument("--form", choices=_FORMS, default="flag", help=forms)


def run(args: argparse.Namespace) -> int:
    """Print vLLM's arguments in the form that `--form` chose.

    Raises:
        ConfigError: the settings cannot be used.
    """
    settings = read_settings(args.config, "--config", host_bytes=args.host_bytes)
    if "kv_connector" in settings:
        raise ConfigError([f"kv_connector belongs around {_KEY}, which this command writes"])
    config = parse_config(settings, advice=f"give --host-bytes; {ADVICE}")
    print(_PRINTERS[args.form](transfer_config(_renamed(settings, config))))
    return 0


def _renamed(settings: Mapping[str, object], config: OffloadConfig) -> dict[str, object]:
    """Return the settings with our keys in the place of those of vLLM's own connector.

    The key for the bytes of one rank stays, because the number of ranks is not known here.
    """
    renamed: dict[str, object] = {}
    for name, value in settings.items():
        if name == "lazy_offload":
            renamed["store_policy"] = config.store_policy
        elif name != "kv_offload_backend":  # its only value changes nothing
            renamed[name if name == PER_RANK else ALIASES.get(name, name)] = value
    return renamed


def transfer_config(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the `kv_transfer_config` with which vLLM uses kvoffload and the given settings."""
    return {
        "kv_connector": NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": RECOMPUTE,
        _KEY: dict(settings),
    }


def _flag(config: Mapping[str, object]) -> str:
    return f"{_CACHING} --kv-transfer-config {shlex.quote(json.dumps(config, separators=(',', ':')))}"


def _dotted(config: Mapping[str, object]) -> str:
    pairs = {name: value for name, value in config.items() if name != _KEY}
    extra = config[_KEY]
    assert isinstance(extra, dict)
    pairs |= {f"{_KEY}.{name}": value for name, value in extra.items()}
    words = (f"--kv-transfer-config.{name} {shlex.quote(_word(value))}" for name, value in pairs.items())
    return " ".join([_CACHING, *words])


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _yaml(config: Mapping[str, object]) -> str:
    lines = ["enable-prefix-caching: true", "kv-transfer-config:"]
    for name, value in config.items():
        if isinstance(value, dict):
            lines += [f"  {name}:", *(f"    {key}: {json.dumps(one)}" for key, one in value.items())]
        else:
            lines.append(f"  {name}: {json.dumps(value)}")  # JSON is valid YAML
    return "\n".join(lines)


def _python(config: Mapping[str, object]) -> str:
    arguments = "".join(f"    {name}={_literal(value)},\n" for name, value in config.items())
    return f"enable_prefix_caching=True,\nkv_transfer_config=KVTransferConfig(\n{arguments})"


def _literal(value: object) -> str:
    """Return a value as Python source with double quotes, as a code formatter writes strings."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


_PRINTERS = {"flag": _flag, "dotted": _dotted, "yaml": _yaml, "python": _python}
