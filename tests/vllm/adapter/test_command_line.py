"""Checks how the doctor reads vLLM's command line, and that a stock vLLM reads it in the same way."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvoffload.checks.launch import find_launch
from kvoffload_vllm import command_line, doctor
from kvoffload_vllm.command_line import COMMANDS, EXAMPLE, Line, read_line
from tests.vllm.adapter.stand_ins import on_vllm
from tests.vllm.adapter.test_doctor import GOOD, findings
from tests.vllm.adapter.test_model_sizes import QWEN3_8B, save

TRANSFER = json.dumps(GOOD)
ROOMY = json.dumps({**GOOD, "kv_connector_extra_config": {"host_bytes": "9MiB"}})
LINES: dict[str, dict[str, Any]] = {
    "M": {},
    "--model M --tensor-parallel-size 2": {"tensor_parallel_size": 2},
    "-tp 2 M": {"tensor_parallel_size": 2},
    "--block-size 32 --no-enable-prefix-caching M": {"block_size": 32, "enable_prefix_caching": False},
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
    "M --max-model-len 32_768 --gpu-memory-utilization .9": {"max_model_len": 32_768},
    "M --max-model-len -1 --seed -3": {},
    "M --lora-modules a=b c=d --no-enable-log-requests --api-key k -cc '{}' --kv-offloading-backend native": {},
    "M --kv_offloading_size=48 --enable-cumem-allocator": {
        "kv_offloading_size": 48.0,
        "enable_cumem_allocator": True,
    },
}
OURS = {"model", *(name for wanted in LINES.values() for name in wanted)}


def read(line: str) -> Line:
    return read_line(find_launch(shlex.split(line), COMMANDS, EXAMPLE))


def values(found: argparse.Namespace) -> dict[str, Any]:
    """Return the values that vLLM reads, without numbers that vLLM chooses itself."""
    given = {name: getattr(found, name, None) for name in OURS}
    transfer = given["kv_transfer_config"]
    if transfer is not None:
        given["kv_transfer_config"] = {name: getattr(transfer, name) for name in GOOD}
    return {name: value for name, value in given.items() if value not in (None, -1)}


@pytest.mark.parametrize("line", LINES)
def test_the_options_of_a_line_are_read(line: str) -> None:
    found = read(f"vllm serve {line}")
    transfer = {} if found.transfer is None else {"kv_transfer_config": found.transfer}
    given = {name: value for name, value in found.values.items() if value != 0 or value is False}
    if "kv_offloading_size" in given:
        given["kv_offloading_size"] = float(given["kv_offloading_size"])
    assert given | transfer == {"model": "M"} | LINES[line]
    assert (found.problems, found.unread) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        "/opt/vllm/bin/vllm serve M --block-size 32",
        "VLLM_PLUGINS=x python3 -m vllm.entrypoints.openai.api_server --model M --block-size 32",
        "python -m vllm.entrypoints.cli.main serve M --block-size 32",
        "python3 /app/vllm/entrypoints/openai/api_server.py --model M --block-size 32",
        "uvx vllm@0.32.0 serve M --block-size 32",
        "python3 -m dynamo.vllm --model M --block-size 32 --is-prefill-worker",
        "docker run --gpus all vllm/vllm-openai:v0.32.0 --model M --block-size 32",
        "podman run -p 8000:8000 --name vllm-openai docker.io/vllm/vllm-openai-cpu M --block-size=32",
        "--model M --block-size 32",
        '\'args: ["--model=M", "--block-size=32"]\'',
    ],
)
def test_every_way_to_start_a_server_is_recognized(line: str) -> None:
    assert read(line).values == {"model": "M", "block_size": 32}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-tp two --block-size 32", "--tensor-parallel-size: 'two' is not a whole number"),
        ("--max-num-seqs --block-size 32 --dtype", "--dtype has no value"),
        ("--block-size 32 --kv-cache-memory-bytes lots", "'lots' is not a size"),
        ("--max-model-len -2 --block-size 32", "'-2' is not a size"),
        ("--kv-transfer-config '{\"kv' --block-size 32", "--kv-transfer-config is not JSON"),
        ("--kv-transfer-config [] --block-size 32", "--kv-transfer-config"),
        ("\u2013block-size 32", "\u2013block-size begins with a dash that is no hyphen"),
        ("\u2014block-size=32", "begins with a dash that is no hyphen"),
    ],
)
def test_a_value_that_vllm_would_refuse_is_a_problem_and_the_others_are_read(line: str, said: str) -> None:
    found = read(f"vllm serve M {line}")
    assert len(found.problems) == 1
    assert said in found.problems[0]
    assert found.values == {"model": "M", "block_size": 32}


@pytest.mark.parametrize("line", ["M --zz.b 1 --zz.b.c 2", "M --zz.b", "M --.=", "M --", "M - -- x", "--x"])
def test_odd_words_are_ignored(line: str) -> None:
    assert read(f"vllm serve {line}").problems == []


YAML = """
model: N
tensor_parallel_size: 2
no-enable-prefix-caching: true
block-size: 64
served-model-name: [a, b]
kv-transfer-config:
  kv_connector: KVOffloadConnector
  kv_role: kv_both
  kv_load_failure_policy: recompute
  kv_connector_extra_config: {host_bytes: 1MiB}
"""


def test_the_file_of_config_is_read_and_the_line_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(YAML)
    found = read(f"vllm serve M --config {tmp_path}/serve.yaml --block-size 32")
    assert found.values == {
        "model": "M",
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "block_size": 32,
    }
    assert (found.transfer, found.unread) == (GOOD, [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "does not hold options"),
        ("- a\n- b\n", "does not hold options"),
        ("a: [", "not YAML"),
        ("a: " + "[" * 4000, "not YAML"),
        ("\xff", "not YAML"),
        ("a: 1\n---\nb: 2\n", "does not hold options"),
        (f"a: &a {'x' * 50_000}\nb: [{', '.join(['*a'] * 1_000)}]\n", "with its aliases written out"),
    ],
)
def test_a_file_of_config_that_cannot_be_read_is_said(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "serve.yaml").write_text(content, encoding="latin-1")
    found = read(f"vllm serve M --config {tmp_path}/serve.yaml --block-size 32")
    assert found.values == {"model": "M", "block_size": 32}
    assert said in found.unread[0]


def test_a_mistyped_option_that_names_no_file_is_said() -> None:
    for words in ("--config.yaml", "--config.a 1", "--config"):
        found = read(f"vllm serve M {words}")
        assert (found.values, len(found.unread)) == ({"model": "M"}, 1)


def test_a_file_in_a_container_and_a_variable_are_unread(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(YAML)
    inside = read(f"docker run vllm/vllm-openai M --config {tmp_path}/serve.yaml")
    assert (inside.values, len(inside.unread)) == ({"model": "M"}, 1)
    for unknown in ("$RANKS_UNSET", "`nproc`"):
        found = read(f"vllm serve M -tp '{unknown}'")
        assert (found.unread, found.problems) == ([f"the values of variables in {unknown}"], [])


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
        ("ALL --hf-overrides {} -sc {}", "model sizes", "unknown", "--hf-overrides, --speculative-config"),
        ("ALL --spec-method ngram", "model sizes", "unknown", "sizes with --spec-method are not computed"),
        # the command line has the block size, so the backend does not matter
        ("ALL --attention-backend FLASHINFER", "model sizes", "ok", "88 blocks"),
        ("ALL --num-gpu-blocks-override 80", "model sizes", "ok", "80 blocks"),
        ("ALL -tp 3", "model sizes", "error", "8 KV heads, which 3 ranks cannot share"),
        ("ALL --prefix-caching-hash-algo xxhash", "block hashes", "ok", "xxhash"),
        ("M", "vllm connector", "error", "no --kv-transfer-config"),
        ("--port 8000 M", "model sizes", "unknown", "put MODEL directly after serve"),
        ("no-one/nothing", "model sizes", "unknown", "no-one/nothing is neither a folder nor"),
    ],
)
def test_sizes_and_the_connector_of_a_line(
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
def test_a_stock_vllm_reads_the_file_of_config_in_the_same_way(tmp_path: Path) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (tmp_path / "serve.yaml").write_text(YAML)
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    found = parser.parse_args(["serve", "M", "--config", str(tmp_path / "serve.yaml"), "--block-size", "32"])
    ours = read(f"vllm serve M --config {tmp_path}/serve.yaml --block-size 32").values
    assert {name: getattr(found, name) for name in ours if name != "model"} == {
        name: value for name, value in ours.items() if name != "model"
    }
    assert found.model_tag == ours["model"]


@on_vllm
def test_option_names_and_abbreviations_are_those_of_a_stock_vllm() -> None:
    """An abbreviation that is read must not stand for another option in a stock vLLM."""
    of_doctor = argparse.ArgumentParser(add_help=False)
    doctor._add_options(of_doctor.add_argument)
    own = {"--device-blocks", "--speculative-model"}  # the second belongs to older versions
    named = {name for action in of_doctor._actions for name in action.option_strings} | command_line._NAMES
    named |= {*command_line._SHORT, *command_line._SHORT.values()}
    stock = {name for action in stock_parser()._actions for name in action.option_strings}
    assert named - own - stock == set()
    begins = {name for name in stock - named if any(one.startswith(name) for one in named)}
    assert {name for name in begins if name.startswith("--")} == set()
