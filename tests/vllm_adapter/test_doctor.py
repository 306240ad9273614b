"""What vLLM's adapter asks before a vLLM starts; and, where there is one, in its own environment and at its start."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.checks import memory
from kvoffload.checks.check import Check, run_checks
from kvoffload.checks.gpus import Gpus
from kvoffload.checks.machine import Machine
from kvoffload.cli.doctor.given import settings_of, setup_of
from kvoffload.cli.main import main
from kvoffload.model.config import OffloadConfig
from kvoffload.testing import FakeDevice
from kvoffload.testing.logs import capture_logs
from kvoffload_vllm import doctor
from kvoffload_vllm.support import NEEDED, NEWEST_RUN, VERSIONS
from tests.doctor.trees import ask, machine, setup
from tests.vllm_adapter.stand_ins import cache_config, full, group, vllm_config

GOOD = {
    "kv_connector": "KVOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": "1MiB"},
}


def found(capsys: pytest.CaptureFixture[str], transfer: object, *argv: str) -> dict[str, Any]:
    main(["doctor", "--json", "--kv-transfer-config", json.dumps(transfer), *argv])
    return {one.pop("check"): one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_a_good_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    path.write_text(json.dumps(GOOD))
    main(["doctor", "--json", "--kv-transfer-config", str(path), "--enable-prefix-caching"])
    checks = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    for name in ("settings", "vllm connector", "load failures", "prefix caching"):
        assert checks[name]["verdict"] == "go", name
    assert "1.0 MiB of all ranks" in checks["machine memory"]["finding"]


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"kv_load_failure_policy": "fail"}, "load failures", "vLLM fails every request whose load fails"),
        ({"kv_load_failure_policy": None}, "load failures", "vLLM"),
        (
            {"kv_load_failure_policy": "fail", "kv_connector_extra_config": {"verify": "full"}},
            "load failures",
            "whose load fails; with verify 'full' the connector refuses to start",
        ),
        ({"kv_role": "kv_producer"}, "vllm connector", "kv_role is 'kv_producer'"),
        ({"kv_role": None}, "vllm connector", "kv_role is not given"),
        ({"kv_connector": "Another"}, "vllm connector", "kv_connector is 'Another'"),
        ({"kv_connector_extra_config": {"lazy": 1}}, "settings", "unknown key 'lazy'"),
        ({"kv_connector_extra_config": [1]}, "settings", "kv_connector_extra_config"),
    ],
)
def test_what_is_wrong_with_a_configuration(
    changes: dict[str, object], check: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = found(capsys, {**GOOD, **changes})[check]
    assert one["verdict"] == "no-go"
    assert text in one["finding"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=2) | st.dictionaries(st.sampled_from(sorted(GOOD)), each, max_size=3)
    ),
    max_leaves=6,
)
NOWHERE = Machine(read=lambda _: None, space=lambda _: None, gpus=Gpus, version=lambda _: None, environ={})


@given(st.dictionaries(st.sampled_from([*GOOD, "connectors"]), anything, max_size=5), st.booleans())
def test_property_any_configuration_gets_its_findings(changes: dict[str, Any], is_ours: bool) -> None:
    transfer = {**GOOD, **changes} if is_ours else changes
    args = argparse.Namespace(
        kv_transfer_config=json.dumps(transfer), enable_prefix_caching=None,
        page_bytes=None, block_bytes=None, ranks=1, device_blocks=None, model=None,
        state_block_tokens=None, prefix_cache_retention_interval=0, replicas=1, block_tokens=None,
        prefix_caching_hash_algo="sha256",
    )  # fmt: skip
    known, settings = setup_of(settings_of([], [doctor], args), [doctor], args)
    for answer in run_checks([settings, *doctor.checks(args), *memory.CHECKS], known, NOWHERE):
        assert "the check itself failed" not in answer.finding.text


def test_vllms_own_default_for_failed_loads_is_a_no_go(capsys: pytest.CaptureFixture[str]) -> None:
    transfer = {key: value for key, value in GOOD.items() if key != "kv_load_failure_policy"}
    assert found(capsys, transfer)["load failures"]["verdict"] == "no-go"


def test_prefix_caching_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, GOOD, "--no-enable-prefix-caching")["prefix caching"]["verdict"] == "no-go"


DISK = {"disk_path": "/somewhere", "disk_bytes": "1GiB"}
REMOTE = {"remote_url": "mooncake://nowhere:1"}


@pytest.mark.parametrize(
    ("algorithm", "tiers", "verdict"),
    [
        ("sha256", DISK, "go"),
        ("sha256_cbor", REMOTE, "go"),
        ("xxhash", {}, "go"),
        ("xxhash", DISK, "warning"),
        ("xxhash_cbor", REMOTE, "warning"),
    ],
)
def test_hashes_for_which_collisions_can_be_searched_are_a_warning_below_the_host(
    capsys: pytest.CaptureFixture[str], algorithm: str, tiers: dict[str, str], verdict: str
) -> None:
    transfer = {**GOOD, "kv_connector_extra_config": {"host_bytes": "1MiB", **tiers}}
    one = found(capsys, transfer, "--prefix-caching-hash-algo", algorithm)["block hashes"]
    assert one["verdict"] == verdict
    assert algorithm in one["finding"]
    assert one["remedy"] == (
        "start vLLM with --prefix-caching-hash-algo sha256" if verdict == "warning" else ""
    )


def test_vllms_default_hashes_are_the_doctors(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, GOOD)["block hashes"]["finding"] == "blocks are found by sha256"


@pytest.mark.parametrize(
    ("argv", "verdict", "text"),
    [
        (("--state-block-tokens", "528"), "warning", "end at multiples of 528 tokens"),
        (
            ("--state-block-tokens", "528", "--prefix-cache-retention-interval", "1056"),
            "go",
            "shorter prefixes are never found",
        ),
    ],
)
def test_where_hits_of_recurrent_models_end(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], verdict: str, text: str
) -> None:
    finding = found(capsys, GOOD, *argv)["recurrent states"]
    assert finding["verdict"] == verdict
    assert text in finding["finding"]


def test_one_of_several_connectors(capsys: pytest.CaptureFixture[str]) -> None:
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Another"}, "odd", {**GOOD}]},
    }
    checks = found(capsys, several)
    assert checks["vllm connector"]["verdict"] == "go"
    assert "1.0 MiB of all ranks" in checks["machine memory"]["finding"]


VERSION, PLUGIN = doctor._version, doctor._registration
SOURCE = "\n".join(f"    def {name}(self): ..." for name in NEEDED)


@pytest.mark.parametrize(
    ("version", "source", "verdict", "text"),
    [
        (None, SOURCE, "not known", "vLLM is not installed"),
        ("0.32.0+cpu", SOURCE, "go", "vLLM 0.32.0+cpu has what the connector needs"),
        ("0.27.1", SOURCE.replace(NEEDED[-1], "other"), "no-go", f"vLLM 0.27.1 lacks {NEEDED[-1]}"),
        ("0.32.0", None, "warning", "cannot be read"),
        ("0.34.0", SOURCE, "warning", "is newer than any that was run"),
        ("1.0", SOURCE, "warning", "is newer"),
    ],
)
def test_version(tmp_path: Path, version: str | None, source: str | None, verdict: str, text: str) -> None:
    where = machine(tmp_path, version={"vllm": version}.get, source=lambda package, path: source)
    reported = ask(Check("version", VERSION), setup(), where)
    assert reported[0] == verdict
    assert text in reported[1]


def test_the_newest_version_is_one_that_the_words_name() -> None:
    assert ".".join(map(str, NEWEST_RUN)) in VERSIONS


@pytest.mark.parametrize(
    ("points", "environ", "verdict", "text"),
    [
        ({"kvoffload": "kvoffload_vllm.register:register"}, {}, "go", "will find the connector"),
        (
            {"kvoffload": "another:thing"},
            {},
            "no-go",
            "is another:thing, not kvoffload_vllm.register:register",
        ),
        ({}, {}, "no-go", "is not registered"),
        (
            {"kvoffload": "kvoffload_vllm.register:register"},
            {"VLLM_PLUGINS": "a,b"},
            "no-go",
            "does not load",
        ),
        ({"kvoffload": "kvoffload_vllm.register:register"}, {"VLLM_PLUGINS": ""}, "no-go", "does not load"),
        ({"kvoffload": "kvoffload_vllm.register:register"}, {"VLLM_PLUGINS": "a,kvoffload"}, "go", "find"),
    ],
)
def test_registration(
    tmp_path: Path, points: dict[str, str], environ: dict[str, str], verdict: str, text: str
) -> None:
    where = machine(tmp_path, entry_points={"vllm.general_plugins": points}.__getitem__, environ=environ)
    reported = ask(Check("plugin", PLUGIN), setup(), where)
    assert reported[0] == verdict
    assert text in reported[1]


@pytest.mark.vllm
@pytest.mark.slow
def test_in_vllms_own_environment() -> None:
    assert importlib.util.find_spec("vllm") is not None
    argv = ["--json", "--kv-transfer-config", json.dumps(GOOD), "--enable-prefix-caching"]
    command = [sys.executable, "-m", "kvoffload.cli", "doctor", *argv]
    reported = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    checks = {one["check"]: one for one in json.loads(reported.stdout)["findings"]}
    for name in ("vllm version", "vllm plugin", "vllm connector", "load failures", "prefix caching"):
        assert checks[name]["verdict"] == "go", checks[name]
    assert reported.returncode == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("policy", "reported"), [("fail", ["load failures"]), ("recompute", [])])
def test_vllms_connector_warns_of_failed_loads(
    policy: str, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload_vllm import assembly

    monkeypatch.setattr(assembly, "_check", lambda *_: (None, OffloadConfig(host_bytes=2 * 131072)))
    monkeypatch.setattr(assembly, "find_failure_policy", lambda _: policy)
    given = vllm_config(world_size=1)
    given.parallel_config.rank = 0
    worker = assembly.make_worker(given, cache_config(group(full())))
    with capture_logs() as lines:
        worker.register(FakeDevice(9, [65536, 65536]).layout)
        worker.close()
    found = [line["check"] for line in lines if line["event"] == "doctor_warning"]
    assert [check for check in found if check == "load failures"] == reported


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_vllms_worker_warns_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload_vllm import assembly

    monkeypatch.setattr(assembly, "_check", lambda *_: (None, OffloadConfig(host_bytes=2 * 131072)))
    monkeypatch.setattr(assembly, "find_failure_policy", lambda _: "recompute")
    given = vllm_config(world_size=1)
    given.parallel_config.rank = 0
    worker = assembly.make_worker(given, cache_config(group(full())))
    with capture_logs() as lines:
        worker.register(FakeDevice(9, [65536, 65536]).layout)
        worker.close()
    reported = [line for line in lines if line["event"] == "doctor_warning"]
    (pool,) = [line for line in reported if line["check"] == "host pool"]
    assert "blocks on the host, 8 on the device" in pool["finding"]
