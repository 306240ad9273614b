"""The doctor's findings about command lines as people write them, where vLLM is not installed.

Names, folders and addresses are made up. What cannot be known without vLLM is never "ok".
"""

from __future__ import annotations

import argparse
import json
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.checks.check import Setup, run_checks
from kvoffload_vllm import doctor
from tests.settings import make_config
from tests.vllm.adapter.test_doctor import GOOD, findings
from tests.vllm.adapter.test_model_sizes import QWEN3_8B, save

OURS = f"--kv-transfer-config {shlex.quote(json.dumps(GOOD))}"
IMAGE = "docker run --rm --gpus all --ipc=host -p 8000:8000 -e HF_TOKEN=x vllm/vllm-openai:v0.32.0"
SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True"
MULTI = {**GOOD, "kv_connector": "MultiConnector"}
MULTI["kv_connector_extra_config"] = {"connectors": [{"kv_connector": "NixlConnector"}, GOOD]}


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", find)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


def options(capsys: pytest.CaptureFixture[str], line: str) -> tuple[str, str]:
    """Return the verdict and the text about the options of a line. The other checks must have run."""
    found = findings(capsys, "--", *shlex.split(line.replace("OURS", OURS)))
    assert found["host memory"]["verdict"] == "ok"
    assert found["settings"]["verdict"] == "ok"
    one = found["vllm options"]
    assert one["remedy"]
    return one["verdict"], f"{one['finding']} | {one['remedy']}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm serve org/m --no-enable-prefix-caching OURS", "prefix caching is off"),
        (f"{IMAGE} --model org/m --no-enable-prefix-caching OURS", "prefix caching is off"),
        ("podman run -d vllm-openai:latest org/m --no-enable-prefix-caching OURS", "prefix caching is off"),
        ("--model org/m --no-enable-prefix-caching OURS", "prefix caching is off"),
        ("python -m dynamo.vllm --model org/m --no-enable-prefix-caching OURS", "prefix caching is off"),
        ("vllm serve s3://bucket/m --no-enable-prefix-caching OURS", "prefix caching is off"),
        ("vllm serve /mnt/models --no_enable_prefix_caching OURS", "prefix caching is off"),
        ("vllm serve org/m-GGUF:Q4_K_M --no-enable-prefix-caching OURS", "prefix caching is off"),
        ("vllm serve org/m -tp 8 -pcp 2 OURS", "prefill_context_parallel_size is 2"),
        ("vllm serve org/m -tp 2 --distributed-executor-backend external_launcher OURS", "with 2 ranks"),
        ("vllm serve org/m -tp two OURS", "--tensor-parallel-size: 'two' is not a whole number"),
        ("vllm serve org/m --kv-offloading-size 48 OURS", "remove --kv-offloading-size"),
        ("vllm serve org/m --kv_offloading_size=48 OURS", "remove --kv-offloading-size"),
        ("vllm serve org/m --kv-offloading-size 9 --kv-offloading-backend native OURS", "vLLM uses its own"),
        (f"{IMAGE} org/m --kv-offloading-size=48 OURS", "vLLM uses its own connector instead of"),
        (f"{SEGMENTS} vllm serve org/m OURS", "take expandable_segments:True out"),
        (f"docker run -e {SEGMENTS} img org/m OURS", "take expandable_segments:True out"),
        (f"bash -c '{SEGMENTS} vllm serve org/m --kv-transfer-config TRANSFER'", "expandable_segments:True"),
        ("vllm serve org/m --config=serve.yaml OURS", "write --config and the file as two words"),
    ],
)
def test_what_the_text_of_a_line_shows_is_an_error(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict, text = options(capsys, line.replace("TRANSFER", json.dumps(json.dumps(GOOD))))
    assert (verdict, said in text) == ("error", True), text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm serve org/m OURS", "vLLM is not installed"),
        (f"{SEGMENTS} vllm serve org/m --enable-cumem-allocator OURS", "vLLM is not installed"),
        (f"{IMAGE} org/m OURS", "run the doctor in that image"),
        ("vllm serve org/m -sc '{\"model\":\"org/draft\",\"num_speculative_tokens\":3}' OURS", "vLLM is not installed"),
        ("vllm serve org/whisper OURS", "vLLM is not installed"),
        ("vllm serve org/m --enable-sleep-mode OURS", "vLLM is not installed"),  # depends on the version
        ("vllm serve org/m --config /nowhere/serve.yaml OURS", "serve.yaml cannot be read"),
        ("vllm serve '$MODEL' -tp '$RANKS_UNSET' OURS", "$RANKS_UNSET"),
    ],
)  # fmt: skip
def test_what_only_vllm_can_tell_is_unknown(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKS_UNSET", raising=False)
    verdict, text = options(capsys, line)
    assert (verdict, said in text) == ("unknown", True), text


def test_a_containers_environment_is_not_this_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = SEGMENTS.partition("=")
    monkeypatch.setenv(name, value)
    assert options(capsys, f"{IMAGE} org/m OURS")[0] == "unknown"
    assert options(capsys, "vllm serve org/m OURS")[0] == "error"


def test_the_lines_environment_says_where_models_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    (snapshot := tmp_path / "hub/models--org--m/snapshots/main").mkdir(parents=True)
    save(snapshot, {**QWEN3_8B, "is_encoder_decoder": True})
    assert options(capsys, f"HF_HOME={tmp_path} vllm serve org/m OURS")[0] == "error"
    assert options(capsys, "vllm serve org/m OURS")[0] == "unknown"
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # a container mounts this machine's cache
    assert options(capsys, f"{IMAGE} org/m OURS")[0] == "error"


def test_an_encoder_decoder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, {**QWEN3_8B, "is_encoder_decoder": True})
    assert "is an encoder-decoder" in options(capsys, f"vllm serve {folder} OURS")[1]


def test_our_connector_in_a_multi_connector_is_replaced_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"vllm serve org/m --kv-offloading-size 4 --kv-transfer-config '{json.dumps(MULTI)}'"
    assert options(capsys, line)[0] == "error"


YAML = "no-enable-prefix-caching: true\nkv-transfer-config:\n  kv_connector: KVOffloadConnector\n"


def test_the_connector_in_a_file_of_config_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in GOOD.items() if key != "kv_connector")
    (tmp_path / "serve.yaml").write_text(YAML + rest)
    assert options(capsys, f"vllm serve org/m --config {tmp_path}/serve.yaml")[0] == "error"


@pytest.mark.parametrize(
    ("line", "verdicts"),
    [
        # what was not read may hold the connector and its settings
        ("vllm serve org/m --config /nowhere.yaml", ("unknown", "unknown")),
        ("vllm serve org/m '$OPTIONS_UNSET'", ("unknown", "unknown")),
        ("vllm serve org/m --kv-transfer-config {broken", ("unknown", "unknown")),
        ("bash start.sh", ("unknown", "unknown")),
        ("vllm serve org/m", ("error", "error")),
        ("vllm serve org/m --kv-transfer-config '{\"kv_connector\":\"LMCacheConnectorV1\"}'", ("error", "error")),
    ],
)  # fmt: skip
def test_a_connector_that_was_not_read_is_unknown(
    line: str, verdicts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(capsys, "--", *shlex.split(line))
    assert (found["vllm connector"]["verdict"], found["settings"]["verdict"]) == verdicts
    assert found["swap"]["verdict"] != "unknown"
    assert found["vllm options"]["verdict"] != "ok"


def test_settings_of_the_doctor_itself_are_checked_beside_an_unreadable_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = findings(capsys, "--config", "host_bytes=1MiB", "--", "bash", "start.sh")
    assert (found["settings"]["verdict"], found["host memory"]["verdict"]) == ("ok", "ok")
    assert "give a command line such as: vllm serve" in found["vllm options"]["remedy"]


FULL: dict[str, Any] = {
    "version": "0.32.0",
    "transfer": GOOD,
    "values": {},
    "connector": "KVOffloadConnector",
    "problems": [],
    "tier_problems": ["weights"],
    "tier_problems_with_weights_id": [],
    "hash_algorithm": "sha256",
    "drafts": None,
    "sizes": {},
    "warnings": [],
}
DISK = {**GOOD, "kv_connector_extra_config": {"host_bytes": "1MiB", "disk_path": "/nowhere/kv"}}
NAMED = {
    **GOOD,
    "kv_connector_extra_config": {"host_bytes": "1MiB", "disk_path": "/nowhere/kv", "weights_id": "v1"},
}


@pytest.mark.parametrize(
    ("reply", "transfer", "verdict", "said"),
    [
        ({}, GOOD, "ok", "vLLM 0.32.0 accepts them"),
        ({"warnings": ["prefix caching is odd"]}, GOOD, "warning", "prefix caching is odd"),
        ({"drafts": "draft_model"}, GOOD, "ok", "accepts them"),
        ({"drafts": "dflash"}, GOOD, "warning", "drafts of the method 'dflash', with which the connector was never run"),
        ({"problems": ["a reason"]}, GOOD, "error", "a reason"),
        ({"connector": "OffloadingConnector"}, GOOD, "error", "remove --kv-offloading-size"),
        ({}, DISK, "error", "weights"),
        ({}, NAMED, "ok", "accepts them"),
        ({"refused": "KV connector ... expandable_segments:True", "connector": None}, GOOD, "error", "--enable-cumem"),
        ({"refused": "unrecognized arguments: --x", "connector": None}, GOOD, "error", "what this vLLM does not have"),
        ({"unknown": "no device", "connector": None}, GOOD, "unknown", "no device"),
        # vLLM's configuration decides, and not the text of the line
        ({"values": {"model": "M"}, "problems": ["from vLLM"]}, GOOD, "error", "from vLLM"),
    ],
)  # fmt: skip
def test_what_vllm_replies_decides(
    reply: dict[str, Any], transfer: dict[str, Any], verdict: str, said: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole = {**FULL, **reply, "transfer": transfer}
    if "refused" in reply or "unknown" in reply:
        del whole["connector"]
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.32.0")
    monkeypatch.setattr("kvoffload.checks.ask.ask", lambda *_: whole)
    line = f"vllm serve M --kv-transfer-config '{json.dumps(transfer)}'"
    found = findings(capsys, "--", *shlex.split(line))["vllm options"]
    assert (found["verdict"], said in f"{found['finding']} {found['remedy']}") == (verdict, True), found


def test_sizes_and_ranks_in_vllms_reply_are_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"page_bytes": 1 << 16, "pages": 4, "tokens": 16, "calculation": "by vLLM"}
    values = {"model": "M", "tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20}
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.32.0")
    monkeypatch.setattr("kvoffload.checks.ask.ask", lambda *_: {**FULL, "sizes": sizes, "values": values})
    found = findings(capsys, "--", *shlex.split("vllm serve M OURS".replace("OURS", OURS)))
    assert "256.0 KiB a block and rank (by vLLM); 4 blocks fit" in found["model sizes"]["finding"]
    assert found["host pool"]["finding"].startswith("2 blocks on the host, 4 on the device")


WORDS = [
    "vllm",
    "serve",
    "docker",
    "run",
    "-e",
    "-c",
    "--",
    "--model",
    "--config",
    "$X",
    "[",
    "'",
    "|",
    "a=b",
]
WORDS += [
    "--kv-transfer-config",
    "--kv-transfer-config.kv_connector",
    "vllm serve M -tp 2 | x",
    "-tp",
    "",
    "{",
]


@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=5), min_size=1, max_size=8))
def test_property_any_words_get_their_findings(words: list[str]) -> None:
    args = argparse.Namespace(command_line=words)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser.add_argument_group())
    parser.parse_args([], args)
    found = run_checks(doctor.read_arguments(args).checks, Setup(make_config()))
    assert [one for one in found if "the check itself failed" in one.text] == []


# -- the tier below vLLM's own connector ----------------------------------------------------------------------------

TIER = {"type": "KVOffloadTier", "module_path": "kvoffload_vllm.secondary_tier", "disk_bytes": "64MiB"}


def below(tmp_path: Path, changes: dict[str, Any] | None = None, /, **tier: object) -> str:
    entry = {**TIER, "disk_path": str(tmp_path), **tier}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 26, "secondary_tiers": [entry]}
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return json.dumps({**whole, **(changes or {})})


def of_tier(capsys: pytest.CaptureFixture[str], transfer: str, *options: str) -> dict[str, Any]:
    return findings(capsys, "--", "vllm", "serve", "org/m", *options, "--kv-transfer-config", transfer)


def test_the_tier_below_vllms_connector_is_checked_and_no_host_memory_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # what only kvoffload's connector refuses is no problem of the tier
    found = of_tier(capsys, below(tmp_path, enable_kv_events=True), "-pcp", "2", "--kv-offloading-size", "1")
    assert {one["verdict"] for one in found.values()} <= {"ok", "unknown", "warning"}
    assert found["disk space"]["finding"].startswith("64.0 MiB")
    assert "host memory is vLLM's" in found["vllm connector"]["finding"]
    assert found.keys() & {"host memory", "load failures", "vllm plugin"} == set()


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"disk_byte": 1}, "unknown key 'disk_byte'; did you mean disk_bytes?"),
        ({"locality": "LOCAL"}, "unknown key 'locality'"),
        ({"disk_bytes": "much"}, "disk_bytes is 'much'"),
        ({"host_bytes": "1GiB"}, "host_bytes does not concern"),
        ({"disk_path": None}, "disk_path"),
        ({"remote_url": "mooncake://host"}, "remote_url"),
        ({"tier_key_file": "/nowhere/key"}, "tier_key_file: /nowhere/key"),
    ],
)
def test_each_bad_setting_of_the_tier_is_an_error(
    tier: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = of_tier(capsys, below(tmp_path, **tier))["settings"]
    assert (settings["verdict"], said in settings["finding"]) == ("error", True), settings


@pytest.mark.parametrize(
    ("changes", "tier", "said"),
    [
        ({"kv_connector": "SimpleCPUOffloadConnector"}, {}, "secondary_tiers belong to OffloadingConnector"),
        ({}, {"type": "fs"}, "type of the tier is 'fs'"),
        ({}, {"module_path": "elsewhere"}, "module_path of the tier is 'elsewhere'"),
    ],
)
def test_a_tier_that_vllm_would_not_create_is_an_error(
    changes: dict[str, Any], tier: dict[str, object], said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    connector = of_tier(capsys, below(tmp_path, changes, **tier))["vllm connector"]
    assert (connector["verdict"], said in connector["finding"]) == ("error", True), connector


def test_a_tier_needs_its_spec_and_a_vllm_that_has_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = json.loads(below(tmp_path))
    del transfer["kv_connector_extra_config"]["spec_name"]
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.32.0")
    monkeypatch.setattr("kvoffload.checks.ask.ask", lambda *_: {"version": "0.32.0", "unknown": "no device"})
    found = of_tier(capsys, json.dumps(transfer))["vllm connector"]["finding"]
    assert "spec_name is None" in found
    assert "vLLM 0.32.0 has no tiers" in found
