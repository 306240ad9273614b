"""Tests that `kvoffload vllm-args` prints the text of docs/install.md, and that a stock vLLM accepts every
form of it.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.main import main
from tests.tooling.scripts import ROOT
from tests.vllm.stock import engines  # noqa: F401  # sets vLLM's environment before it is imported

FORMS = ("flag", "dotted", "yaml", "python")
HOST = ("--host-bytes", "64GiB")


def wanted(**extra: object) -> dict[str, object]:
    return {
        "kv_connector": "KVOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": "64GiB", **extra},
    }


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["vllm-args", *argv]) == 0
    return capsys.readouterr().out.rstrip("\n")


@pytest.mark.parametrize("form", FORMS)
def test_the_documents_show_the_printed_text(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *HOST, "--form", form)
    shown = textwrap.indent(text, "    ") if form == "python" else text
    assert shown in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert form != "flag" or shown in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "extra"),
    [
        (HOST, {}),
        (["--config", '{"host_bytes": "64GiB"}'], {}),
        (
            [*HOST, "--config", "verify=sample", "--config", '{"store_policy":"lazy"}'],
            {"verify": "sample", "store_policy": "lazy"},
        ),
        (
            [
                "--config",
                "cpu_bytes_to_use=64GiB",
                "--config",
                "lazy_offload=true",
                "--config",
                "kv_offload_backend=cpu",
            ],
            {"store_policy": "lazy"},
        ),
        (["--config", '{"cpu_bytes_to_use": "64GiB", "lazy_offload": false}'], {"store_policy": "eager"}),
    ],
)
def test_by_default_a_flag_with_valid_json_is_printed(
    argv: Sequence[str], extra: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    caching, flag, value = shlex.split(printed(capsys, *argv))
    assert (caching, flag) == ("--enable-prefix-caching", "--kv-transfer-config")
    assert json.loads(value) == wanted(**extra)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], ['host_bytes is missing: host memory of one engine, all its ranks together, a number of bytes, such as "64GiB"; give --host-bytes']),
        (["--host-bytes", "many", "--config", "verfiy=full"], ["did you mean verify?", "host_bytes is 'many'"]),
        ([*HOST, "--config", "host_bytes=3GiB"], ["host_bytes is set twice"]),
        (["--config", '{"kv_connector":"X"}'], ["kv_connector belongs around kv_connector_extra_config"]),
        (["--config", "drain_s=3"], ["did you mean disk_drain_s?"]),
    ],
)  # fmt: skip
def test_unusable_settings_are_a_one_line_error(
    argv: Sequence[str], said: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vllm-args", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(part in err for part in said), err


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_a_stock_vllm_reads_every_form_in_the_same_way(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    said = printed(capsys, *HOST, "--form", form, "--config", "min_load_tokens=64")
    if form == "python":
        given = eval(f"dict({said})", {"KVTransferConfig": KVTransferConfig})
    else:
        argv = shlex.split(said)
        if form == "yaml":
            (tmp_path / "vllm.yaml").write_text(said)
            argv = ["--config", str(tmp_path / "vllm.yaml")]
        parser: Any = EngineArgs.add_cli_args(FlexibleArgumentParser())
        given = vars(parser.parse_args(argv))
    found = given["kv_transfer_config"]
    found = KVTransferConfig(**found) if isinstance(found, dict) else found
    assert given["enable_prefix_caching"] is True
    expected = wanted(min_load_tokens=64)
    assert {name: getattr(found, name) for name in expected} == expected
