"""`kvoffload doctor --engine sglang`. Only the last tests need SGLang."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvoffload.checks import outputs
from kvoffload.checks.check import run_checks
from kvoffload.cli.main import main
from kvoffload_sglang import doctor
from kvoffload_sglang.settings import BACKEND, OPTION
from tests.doctor.trees import DENSE, machine, setup

MLA = {"model_type": "deepseek_v2", "kv_lora_rank": 512}
LARGER = {"model_type": "x", "text_config": MLA}
WITH_FILE = ["sglang", "serve", "--enable-hicache", "--hicache-storage-backend", "file"]
OURS = {"settings", "disk space", "disk folder", "sglang version", "sglang options"}


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Run the doctor; return its exit code and its findings by check."""
    code = main(["doctor", "--engine", "sglang", "--json", *argv])
    return code, {one.pop("check"): one for one in json.loads(capsys.readouterr().out)["findings"]}


def launch(disk: Path, *options: str, **extra: object) -> list[str]:
    given = {**BACKEND, "disk_path": str(disk), "disk_bytes": "1MiB", **extra}
    start = ["python", "-m", "sglang.launch_server", "--model-path", "M", "--tp", "2"]
    chosen = ["--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
    return ["--", *start, *chosen, OPTION, json.dumps(given), *options]


def test_only_the_tiers_are_checked_and_no_host_memory_is_demanded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, checks = found(capsys, "--config", f"disk_path={tmp_path}", "--config", "disk_bytes=1MiB")
    assert (code, set(checks)) == (0, OURS)
    assert checks["disk space"]["finding"].startswith("1.0 MiB fit")
    assert checks["sglang options"]["verdict"] == "unknown"
    _, checks = found(capsys, *launch(tmp_path, "--dp-size", "3"))
    assert checks["disk space"]["finding"].startswith("3.0 MiB")


@pytest.mark.parametrize(
    ("argv", "verdict", "text"),
    [
        (["--model-path", "M"], "error", "no --enable-hierarchical-cache"),
        (["--enable-hicache"], "warning", "it must be attached over HTTP later"),
    ],
)
def test_a_command_line_without_a_backend_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], verdict: str, text: str
) -> None:
    disk = ("--config", f"disk_path={tmp_path}", "--config", "disk_bytes=1MiB")
    reported = found(capsys, *disk, "--", *argv)[1]["sglang options"]
    assert (reported["verdict"], text in reported["finding"]) == (verdict, True), reported


def test_settings_that_a_start_refuses_are_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, checks = found(capsys, *launch(tmp_path, host_bytes="1GiB"))
    assert (code, checks["settings"]["verdict"]) == (1, "error")
    assert "host_bytes does not concern" in checks["settings"]["finding"]
    assert "neither disk_path nor remote_url" in found(capsys)[1]["settings"]["finding"]


@pytest.mark.parametrize(
    ("options", "extra", "verdict", "text"),
    [
        ([], {}, "unknown", "SGLang is not installed"),
        (["--speculative-algorithm", "EAGLE"], {}, "unknown", "SGLang is not installed"),
        (["--config", "serve.yaml"], {}, "unknown", "SGLang is not installed"),
        (["--tp", "two"], {}, "error", "--tp-size and --dp-size must be whole numbers"),
        (["--hicache-storage-backend", "file"], {}, "error", "is file, not dynamic"),
        ([], {"class_name": "X"}, "error", "class_name in --hicache-storage-backend-extra-config is 'X'"),
        ([], {"backend_name": None}, "error", "has no backend_name"),
        (["--enable-lora", "--disable-radix-cache"], {}, "error", "excludes HiCache; LoRA is on"),
        (["--load-format", "dummy"], {}, "error", "cannot be identified without weights_id"),
        (["--load-format", "dummy"], {"weights_id": "v1"}, "unknown", "SGLang is not installed"),
    ],
)
def test_each_problem_of_a_command_line_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], extra: dict[str, object],
    verdict: str, text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.metadata.version", _lacking)
    reported = found(capsys, *launch(tmp_path, *options, **extra))[1]["sglang options"]
    assert (reported["verdict"], text in reported["finding"]) == (verdict, True), reported


def _lacking(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("config", "options", "tiers", "verdict"),
    [
        (MLA, ["--tp", "2"], {}, "error"),
        (LARGER, ["--tensor-parallel-size", "8", "--dp-size", "4", "--enable-dp-attention"], {}, "error"),
        (MLA, ["--tp", "8", "--dp", "8", "--enable-dp-attention"], {}, "unknown"),
        (MLA, ["--tp", "1"], {}, "unknown"),
        (MLA, ["--tp", "2"], {"disk_path": None, "remote_url": "s3://bucket"}, "unknown"),
        ({"model_type": "llama"}, ["--tp", "2"], {}, "unknown"),
        ({"model_type": "llama", "limit": float("inf")}, ["--tp", "2"], {}, "unknown"),
    ],
)
def test_latents_that_several_ranks_share_exclude_a_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], options: list[str],
    tiers: dict[str, Any], verdict: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.metadata.version", _lacking)
    monkeypatch.setattr(outputs, "unreachable", lambda _: None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {name: value for name, value in {"disk_path": str(tmp_path), **tiers}.items() if value}
    line = launch(tmp_path, *options, "--model-path", str(tmp_path))
    at = line.index(OPTION) + 1
    line[at] = json.dumps({**BACKEND, **given})
    reported = found(capsys, *line)[1]["sglang options"]
    assert (reported["verdict"], "MLA" in reported["finding"]) == (verdict, verdict == "error"), reported


@pytest.mark.parametrize(
    ("argv", "check", "verdict", "text"),
    [
        (["bash", "start.sh"], "sglang options", "error", "does not start the engine"),
        (["bash", "start.sh"], "settings", "unknown", "cannot be read"),
        (["sglang", "serve", "--model-path", "s3://x/m"], "sglang options", "error", "no --enable-hierarchical"),
        (["sglang", "serve", "--config", "x.yaml"], "sglang options", "unknown", "only SGLang reads the file of --config x.yaml"),
        (["sglang", "serve", "--config", "x.yaml"], "settings", "unknown", "only SGLang reads the file of --config x.yaml"),
        ([*WITH_FILE, OPTION, "[1", "--enable-lora"], "sglang options", "error", "is file, not dynamic; LoRA is on"),
        ([*WITH_FILE, OPTION, "[1"], "sglang options", "error", f"{OPTION} [1 is neither a JSON object"),
        ([*WITH_FILE, OPTION, "[1"], "settings", "error", f"{OPTION} [1 is neither a JSON object"),
        (["docker", "run", "img", *WITH_FILE, "--hicache-storage-backend", "dynamic", OPTION, "@x.json"],
         "sglang options", "unknown", "names a file in the image img"),
        (["docker", "run", "img", *WITH_FILE, OPTION, "@x.json"], "settings", "unknown", "names a file in the image img"),
        (["docker", "run", "img", "python3", "-m", "sglang.launch_server", "--enable-hicache",
          "--hicache-storage-backend", "file"], "sglang options", "error", "is file, not dynamic"),
    ],
)  # fmt: skip
def test_lines_are_found_and_an_unreadable_line_costs_no_other_check(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], check: str, verdict: str, text: str
) -> None:
    _, reported = found(capsys, "--", *argv)
    assert (reported[check]["verdict"], text in reported[check]["finding"]) == (verdict, True), reported
    _, reported = found(
        capsys, "--config", f"disk_path={tmp_path}", "--config", "disk_bytes=1MiB", "--", "bash", "start.sh"
    )
    assert {reported[name]["verdict"] for name in ("settings", "disk space")} == {"ok"}


@pytest.mark.parametrize(
    ("reply", "verdict", "text"),
    [
        ({"is_mla": False, "draft": None}, "ok", "SGLang 0.5.23 accepts them"),
        ({"is_mla": True, "draft": None}, "error", "one of 2 ranks writes"),
        ({"is_mla": False, "draft": "EAGLE3"}, "error", "attach kvoffload at run time"),
        ({"refused": "unrecognized arguments: --x"}, "error", "refuses them: unrecognized"),
        ({"unknown": "no model"}, "unknown", "no model"),
    ],
)
def test_what_sglang_replies_decides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    reply: dict[str, Any], verdict: str, text: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.5.23")
    monkeypatch.setattr("kvoffload.checks.ask.ask", lambda *_: {"version": "0.5.23", **reply})
    reported = found(capsys, *launch(tmp_path))[1]["sglang options"]
    assert (reported["verdict"], text in reported["finding"]) == (verdict, True), reported


@pytest.mark.parametrize(
    ("version", "verdict"), [(None, "unknown"), ("0.5.23", "ok"), ("0.5.24", "warning"), ("0.4.9", "warning")]
)
def test_sglangs_version_is_checked(tmp_path: Path, version: str | None, verdict: str) -> None:
    def find(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    with machine(tmp_path, version=find):
        (reported,) = run_checks([doctor.VERSION], setup())
    assert reported.verdict == verdict


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
def test_the_options_that_the_doctor_reads_are_those_of_sglang() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    own = {name for action in doctor.make_parser()._actions for name in action.option_strings}
    assert own <= set(parser._option_string_actions)


DECODER = {**DENSE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64}
LATENT = {
    **DECODER,
    **MLA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 4,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
def test_sglang_reads_the_file_of_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DECODER))
    extra = json.dumps({**BACKEND, "disk_path": str(tmp_path), "disk_bytes": "1MiB"})
    lines = [
        "enable-hierarchical-cache: true",
        "hicache-storage-backend: dynamic",
        f"{OPTION[2:]}: '{extra}'",
    ]
    (tmp_path / "serve.yaml").write_text("\n".join(lines))
    line = ["--", "sglang", "serve", "--model-path", str(tmp_path), "--config", str(tmp_path / "serve.yaml")]
    _, reported = found(capsys, *line)
    assert {reported[name]["verdict"] for name in ("settings", "sglang options")} == {"ok"}


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "options", "verdict", "text"),
    [
        (DECODER, [], "ok", "accepts them"),
        (DECODER, ["--speculative-algorithm", "NGRAM"], "ok", "accepts them"),
        (LATENT, [], "error", "(MLA)"),
        (LATENT, ["--dp", "2", "--enable-dp-attention"], "ok", "accepts them"),
        (
            DECODER,
            ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "MODEL"],
            "error",
            "with EAGLE3",
        ),
        (
            DECODER,
            ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "org/x"],
            "unknown",
            "not on this machine",
        ),
        (DECODER, ["--model-path", "org/model"], "unknown", "not on this machine"),
        (DECODER, ["--bogus"], "error", "unrecognized arguments: --bogus"),
    ],
)
def test_a_stock_sglang_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], options: list[str],
    verdict: str, text: str,
) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [str(tmp_path) if one == "MODEL" else one for one in options]
    line = launch(tmp_path, *options)
    line[line.index("--model-path") + 1] = str(tmp_path)
    reported = found(capsys, *line)[1]["sglang options"]
    assert (reported["verdict"], text in reported["finding"]) == (verdict, True), reported
