from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.checks.check import Check, Given, Setup, run_checks
from kvoffload.cli.main import main
from kvoffload.model.config import OffloadConfig
from kvoffload.testing import FakeDevice
from kvoffload_vllm import doctor
from kvoffload_vllm.support import RUN
from tests.captured_logs import capture_logs
from tests.doctor.trees import ask, machine, setup
from tests.settings import make_config
from tests.vllm.adapter.stand_ins import cache_config, full, group, on_vllm, vllm_config

NEWEST = RUN[-1]
GOOD = {
    "kv_connector": "KVOffloadConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": "1MiB"},
}


def findings(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    main(["doctor", "--json", *argv])
    return {one.pop("check"): one for one in json.loads(capsys.readouterr().out)["findings"]}


def found(capsys: pytest.CaptureFixture[str], transfer: object) -> dict[str, Any]:
    return findings(capsys, "--kv-transfer-config", json.dumps(transfer))


SEVERAL = {"connectors": [{"kv_connector": "Another"}, "odd", GOOD]}


@pytest.mark.parametrize(
    "transfer", [GOOD, {**GOOD, "kv_connector": "MultiConnector", "kv_connector_extra_config": SEVERAL}]
)
def test_a_good_configuration_in_a_file_passes(
    transfer: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "transfer.json"
    path.write_text(json.dumps(transfer))
    checks = findings(capsys, "--kv-transfer-config", str(path))
    assert [checks[name]["verdict"] for name in ("settings", "vllm connector", "load failures")] == ["ok"] * 3
    assert checks["host memory"]["finding"].startswith("1.0 MiB fit")


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"kv_load_failure_policy": "fail"}, "load failures", "vLLM fails every request whose load fails"),
        ({"kv_load_failure_policy": None}, "load failures", "vLLM"),
        (
            {
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"host_bytes": 1, "verify": "full"},
            },
            "load failures",
            "whose load fails; with verify 'full' the connector refuses to start",
        ),
        ({"kv_role": "kv_producer"}, "vllm connector", "kv_role is 'kv_producer'"),
        ({"kv_role": None}, "vllm connector", "kv_role is None; it must be 'kv_both'"),
        ({"kv_connector": "Another"}, "vllm connector", "kv_connector is 'Another'"),
        ({"kv_connector_extra_config": {"lazy": 1}}, "settings", "unknown key 'lazy'"),
        ({"kv_connector_extra_config": [1]}, "settings", "kv_connector_extra_config"),
    ],
)
def test_each_problem_of_a_configuration_is_reported(
    changes: dict[str, object], check: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """None in `changes` removes the key."""
    given = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    one = found(capsys, given)[check]
    assert one["verdict"] == "error"
    assert text in one["finding"]


def read_arguments(*argv: str) -> Given:
    parser = argparse.ArgumentParser()
    parser.add_argument("command_line", nargs="*")
    doctor.add_arguments(parser.add_argument_group())
    return doctor.read_arguments(parser.parse_args(argv))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=2) | st.dictionaries(st.sampled_from(sorted(GOOD)), each, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "connectors"]), anything, max_size=5), st.booleans())
def test_property_any_configuration_gets_its_findings(changes: dict[str, Any], is_ours: bool) -> None:
    transfer = {**GOOD, **changes} if is_ours else changes
    found = read_arguments("--kv-transfer-config", json.dumps(transfer))
    assert found.settings is None or isinstance(found.settings, dict)
    for answer in run_checks(found.checks, Setup(make_config())):
        assert "the check itself failed" not in answer.text


@pytest.mark.parametrize(
    ("check", "verdict", "text"),
    [
        (doctor.block_hashes("sha256"), "ok", "sha256"),
        (doctor.block_hashes("sha256_cbor"), "ok", "sha256_cbor"),
        (doctor.block_hashes("xxhash"), "warning", "xxhash"),
        (
            doctor.recurrent_states(528, 0),
            "warning",
            "multiples of 528 tokens; shorter prefixes are never found",
        ),
        (doctor.recurrent_states(528, 1056), "ok", "end at multiples of 528 tokens"),
        (doctor.recurrent_states(528, 1056, 16), "ok", "of 528 tokens, or at a prompt's last one of 16"),
        (doctor.recurrent_states(528, None), "ok", "end at multiples of 528 tokens"),
        (doctor.recurrent_states(528, "unknown"), "warning", "does not say at which of them"),
    ],
)
def test_hashes_with_findable_collisions_and_hits_that_end_late_are_warnings(
    tmp_path: Path, check: Check, verdict: str, text: str
) -> None:
    found = ask((check,), check.name, setup(disk_path=tmp_path), machine(tmp_path))
    assert found[0] == verdict
    assert text in found[1]


def test_host_memory_in_files_needs_hashes_without_findable_collisions(tmp_path: Path) -> None:
    known = setup(host_path=tmp_path)
    assert ask((doctor.block_hashes("xxhash"),), "block hashes", known, machine(tmp_path))[0] == "warning"


def test_if_no_block_outlives_the_engine_any_hash_is_ok(tmp_path: Path) -> None:
    assert ask((doctor.block_hashes("xxhash"),), "block hashes", setup(), machine(tmp_path))[0] == "ok"


@pytest.mark.parametrize(
    ("version", "verdict", "text"),
    [
        (None, "unknown", "vLLM is not installed"),
        ("0.32.0+cpu", "ok", "vLLM 0.32.0+cpu"),
        (NEWEST, "ok", f"and {NEWEST} were run"),
        ("0.34.0", "warning", "is newer than any that was run"),
        ("1.0", "warning", "is newer"),
    ],
)
def test_vllms_version_is_checked(tmp_path: Path, version: str | None, verdict: str, text: str) -> None:
    def find(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    found = ask(read_arguments().checks, "vllm version", setup(), machine(tmp_path, version=find))
    assert found[0] == verdict
    assert text in found[1]


@pytest.mark.parametrize(
    ("names", "environ", "verdict", "text"),
    [
        (["kvoffload"], {}, "ok", "will find the connector"),
        ([], {}, "error", "is not registered"),
        (["kvoffload"], {"VLLM_PLUGINS": "a,b"}, "error", "does not load"),
        (["kvoffload"], {"VLLM_PLUGINS": ""}, "error", "does not load"),
        (["kvoffload"], {"VLLM_PLUGINS": "a,kvoffload"}, "ok", "find"),
    ],
)
def test_a_connector_that_vllm_cannot_load_is_an_error(
    tmp_path: Path, names: list[str], environ: dict[str, str], verdict: str, text: str
) -> None:
    def find(group: str, name: str) -> list[str]:
        assert group == "vllm.general_plugins"
        return [one for one in names if one == name]

    where = machine(tmp_path, entry_points=find, environ=environ)
    found = ask(read_arguments().checks, "vllm plugin", setup(), where)
    assert found[0] == verdict
    assert text in found[1]


@on_vllm
def test_the_doctor_runs_in_vllms_environment() -> None:
    assert importlib.util.find_spec("vllm") is not None
    argv = ["--json", "--kv-transfer-config", json.dumps(GOOD)]
    command = [sys.executable, "-m", "kvoffload", "doctor", *argv]
    reported = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    checks = {one["check"]: one for one in json.loads(reported.stdout)["findings"]}
    for name in ("vllm version", "vllm plugin", "vllm connector", "load failures"):
        assert checks[name]["verdict"] == "ok", checks[name]
    assert reported.returncode == 0


@on_vllm
@pytest.mark.parametrize(("policy", "fails"), [("fail", True), ("recompute", False)])
def test_vllms_worker_warns_at_its_start(policy: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload_vllm import assembly
    from kvoffload_vllm.worker import VllmWorker

    checked = SimpleNamespace(shape=SimpleNamespace(sharers=1)), OffloadConfig(host_bytes=2 * 131072)
    monkeypatch.setattr(assembly, "_check", lambda *_: checked)
    monkeypatch.setattr(assembly, "find_failure_policy", lambda _: policy)
    given = vllm_config(world_size=1)
    given.parallel_config.rank = 0
    worker = VllmWorker.__new__(VllmWorker)
    assembly.start_worker(worker, given, cache_config(group(full())))
    with capture_logs() as lines:
        worker.register(FakeDevice(9, [65536, 65536]).layout)
        worker.close()
    reported = {line["check"]: line["finding"] for line in lines if line["event"] == "doctor_warning"}
    assert "blocks on the host, 8 on the device" in reported["host pool"]
    assert ("load failures" in reported) is fails
