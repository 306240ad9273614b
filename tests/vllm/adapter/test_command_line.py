"""Checks how the doctor reads vLLM's command line, and that a stock vLLM reads it in the same way."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.main import main
from kvoffload.model.errors import ConfigError
from kvoffload_vllm import doctor
from kvoffload_vllm.command_line import CHANGE_SIZES, CHOOSE_BLOCKS, read_command_line
from tests.vllm.adapter.stand_ins import on_vllm
from tests.vllm.adapter.test_doctor import GOOD, findings
from tests.vllm.adapter.test_model_sizes import QWEN3_8B, save

TRANSFER = json.dumps(GOOD)
ROOMY = json.dumps({**GOOD, "kv_connector_extra_config": {"host_bytes": "9MiB"}})
LINES: dict[str, dict[str, Any]] = {
    "M": {},
    "--model M --tensor-parallel-size 2": {"tensor_parallel_size": 2},
    "M -tp 2 -pp=4": {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
    "M --tensor_parallel_size=2 --kv_cache_dtype fp8": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
    "M --tensor-par 2": {"tensor_parallel_size": 2},
    "M -dp 4 -dpl 2": {"data_parallel_size": 4, "data_parallel_size_local": 2},
    "M --block-size 32 --dtype half": {"block_size": 32, "dtype": "half"},
    "M --max-model-len 32k": {"max_model_len": 32_000},
    "M --max-model-len 32K": {"max_model_len": 32_768},
    "M --kv-cache-memory-bytes 50G": {"kv_cache_memory_bytes": 50 << 30},
    "M --kv-cache-memory-bytes 1.5g": {"kv_cache_memory_bytes": 1_500_000_000},
    "M --kv-cache-memory-bytes 1000000": {"kv_cache_memory_bytes": 1_000_000},
    "M --block-size 16 --block-size 32": {"block_size": 32},
    "M --max-num-seqs 16 --port 8000 --served-model-name a b --enforce-eager -O3 --quantization fp8": {},
    "M --no-enable-prefix-caching": {"enable_prefix_caching": False},
    "M --enable-sleep-mode": {"enable_sleep_mode": True},
    "M -dcp 2": {"decode_context_parallel_size": 2},
    "M --prefill-context-parallel-size 3": {"prefill_context_parallel_size": 3},
    "M --distributed-executor-backend ray": {"distributed_executor_backend": "ray"},
    "M --prefix-caching-hash-algo xxhash": {"prefix_caching_hash_algo": "xxhash"},
    f"M --kv-transfer-config '{TRANSFER}' --seed 1": {"kv_transfer_config": GOOD},
    f"M --kv_transfer_config='{TRANSFER}'": {"kv_transfer_config": GOOD},
    "M --kv-transfer-config.kv_connector KVOffloadConnector --kv-transfer-config.kv_role=kv_both "
    "--kv_transfer_config.kv_load_failure_policy recompute "
    "--kv-transfer-config.kv_connector_extra_config.host_bytes 1MiB": {"kv_transfer_config": GOOD},
    f"M --kv-transfer-config '{TRANSFER}' --kv-transfer-config.kv_role kv_both --kv-transfer-config.kv_connector "
    "KVOffloadConnector --kv-transfer-config.kv_load_failure_policy=recompute "
    "--kv-transfer-config.kv_connector_extra_config.host_bytes 64G": {
        "kv_transfer_config": {**GOOD, "kv_connector_extra_config": {"host_bytes": 64 << 30}}
    },
    "M --revision abc": {"revision": "abc"},
}
DEFAULTS = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
OURS = {"model", *(name for wanted in LINES.values() for name in wanted)}


def read(line: str) -> argparse.Namespace:
    return read_command_line(shlex.split(line), doctor._add_options)


def values(found: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(found, name, None) for name in OURS}
    transfer = given["kv_transfer_config"]
    if transfer is not None:
        read = json.loads(transfer) if isinstance(transfer, str) else transfer
        given["kv_transfer_config"] = read if isinstance(read, dict) else {k: getattr(read, k) for k in GOOD}
    return {name: value for name, value in given.items() if value is not None}


@pytest.mark.parametrize("line", LINES)
def test_the_options_of_a_line_are_read(line: str) -> None:
    assert values(read(f"vllm serve {line}")) == DEFAULTS | {"model": "M"} | LINES[line]


@pytest.mark.parametrize(
    "line",
    [
        "/opt/vllm/bin/vllm serve M --block-size 32",
        "VLLM_PLUGINS=x python3 -m vllm.entrypoints.openai.api_server --model M --block-size 32",
        "python -m vllm.entrypoints.cli.main serve M --block-size 32",
    ],
)
def test_every_way_to_start_a_server_is_recognized(line: str) -> None:
    assert values(read(line)) == DEFAULTS | {"model": "M", "block_size": 32}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm bench throughput", "such as: -- vllm serve MODEL"),
        ("vllm serve M -tp two", "argument --tensor-parallel-size/-tp: 'two' is not a whole number"),
        ("vllm serve M --block-size", "argument --block-size: expected one argument"),
        ("vllm serve M --kv-cache-memory-bytes lots", "'lots' is not a size"),
        ("vllm serve M --max-model-len -2", "'-2' is not a size"),
        ("vllm serve M --enable-prefix-caching=no", "ignored explicit argument"),
    ],
)
def test_a_line_that_vllm_would_refuse_is_a_one_line_error(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=said):
        read(line)
    assert main(["doctor", "--", *shlex.split(line)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("line", ["M --zz.b 1 --zz.b.c 2", "M --zz.b", "M --.=", "M --", "M - -- x", ""])
def test_odd_words_are_ignored(line: str) -> None:
    assert read(f"vllm serve {line}").block_size is None


SIZED = ["-tp", "2", "-dp", "4", "-dpl", "2", "--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes", "100MiB"]
ALL = [*SIZED, "--block-size", "32", "--max-model-len", "2000", "--kv-transfer-config", ROOMY]


def test_a_pasted_line_and_the_doctors_own_options_give_the_same_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save(tmp_path, QWEN3_8B))
    pasted = findings(capsys, "--", "vllm", "serve", model, "--max-num-seqs", "9", *ALL)
    options = findings(capsys, "--model", model, *ALL)
    # The machine's free memory differs between the two calls.
    memory, _ = pasted.pop("host memory"), options.pop("host memory")
    assert pasted == options | {name: pasted[name] for name in ("vllm options", "block hashes")}
    assert memory["finding"].startswith("18.0 MiB ")  # two engines with 9 MiB each
    # An option before the line overrides the line's.
    found = findings(capsys, "--kv-cache-memory-bytes", "200MiB", "--", "vllm", "serve", model, *ALL)
    assert "177 blocks" in found["model sizes"]["finding"]


@pytest.mark.parametrize(
    ("line", "check", "verdict", "said"),
    [
        ("ALL --max-model-len 3k", "model sizes", "error", "--max-model-len needs 94 blocks, and 88 fit"),
        ("ALL --max-model-len auto", "model sizes", "ok", "88 blocks fit the KV cache"),
        (
            "ALL --speculative-config.method eagle",
            "model sizes",
            "unknown",
            "sizes with --speculative-config",
        ),
        ("ALL -sc {}", "model sizes", "unknown", "sizes with -sc are not computed"),
        ("ALL --hf-overrides {} --config x.yaml", "model sizes", "unknown", "with --config, --hf-overrides"),
        # the command line has the block size, so the backend does not matter
        ("ALL --attention-backend FLASHINFER", "model sizes", "ok", "88 blocks"),
        ("ALL --num-gpu-blocks-override 80", "model sizes", "ok", "80 blocks"),
        ("ALL --no-enable-prefix-caching", "vllm options", "error", "start with --enable-prefix-caching"),
        ("ALL --enable-sleep-mode", "vllm options", "error", "start without --enable-sleep-mode"),
        ("ALL -dcp 2", "vllm options", "error", "decode_context_parallel_size is 2"),
        ("ALL --distributed-executor-backend external_launcher", "vllm options", "error", "with 2 ranks"),
        ("ALL --seed 1", "vllm options", "ok", "the connector works with them"),
        ("ALL --prefix-caching-hash-algo xxhash", "block hashes", "ok", "xxhash"),
        ("M", "vllm connector", "error", "no --kv-transfer-config"),
        ("M --config x.yaml", "vllm connector", "unknown", "the connector that vLLM will use"),
        ("--port 8000 M", "model sizes", "unknown", "put MODEL directly after serve"),
        ("no-one/nothing", "model sizes", "unknown", "no-one/nothing is neither a folder nor"),
    ],
)
def test_the_doctor_reports_the_problems_of_a_line(
    line: str, check: str, verdict: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = shlex.join([str(save(tmp_path, QWEN3_8B)), *ALL])
    found = findings(capsys, "--", "vllm", "serve", *shlex.split(line.replace("ALL", whole)))[check]
    assert (found["verdict"], said in found["finding"] + found["remedy"]) == (verdict, True), found


def stock_parser() -> Any:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())


@on_vllm
def test_a_stock_vllm_reads_a_line_in_the_same_way() -> None:
    parser = stock_parser()
    defaults = values(parser.parse_args(["M"]))
    for line, wanted in LINES.items():
        found = parser.parse_args(shlex.split(line))
        found.model = found.model_tag or found.model
        assert values(found) == defaults | {"model": "M"} | wanted, line


@on_vllm
def test_option_names_and_abbreviations_are_those_of_a_stock_vllm() -> None:
    """An abbreviation that the doctor accepts must not stand for another option in a stock vLLM."""
    ours = argparse.ArgumentParser(add_help=False)
    doctor._add_options(ours.add_argument)
    named = {name for action in ours._actions for name in action.option_strings} - {"--device-blocks"}
    named |= {*CHANGE_SIZES, *CHOOSE_BLOCKS, "--quantization"}
    stock = {name for action in stock_parser()._actions for name in action.option_strings}
    assert named - stock == set()
    assert {name for name in stock - named if any(one.startswith(name) for one in named)} == set()
