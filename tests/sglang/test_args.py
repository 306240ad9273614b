"""Tests that `kvoffload sglang-args` prints the text of docs/sglang.md. These tests do not need SGLang."""

from __future__ import annotations

import json
import shlex

import pytest

from kvoffload.cli.main import main
from tests.tooling.scripts import ROOT

DISK = ("--config", "disk_path=/var/cache/kvoffload", "--config", "disk_bytes=500GiB")


def test_the_page_shows_the_printed_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sglang-args", *DISK]) == 0
    printed = capsys.readouterr().out
    assert f"--model-path MODEL {printed}" in (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")


def test_settings_of_sglang_can_be_given_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sglang-args", *DISK, "--config", '{"prefetch_threshold":64}']) == 0
    extra = json.loads(shlex.split(capsys.readouterr().out)[-1])
    assert (extra["interface_v1"], extra["disk_bytes"], extra["prefetch_threshold"]) == (1, "500GiB", 64)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "neither disk_path nor remote_url is set"),
        (["disk_pth=x"], "did you mean disk_path?"),
        (["disk_path=x", "host_bytes=1GiB"], "host_bytes does not concern a disk or a remote tier"),
        (["disk_path=x", "interface_v1=0"], "interface_v1 is not set"),
        (["disk_path=x", "tier_key_file=/nowhere", "interface_v1=0"], "tier_key_file"),
        (["remote_url=http://x"], "remote_url"),
    ],
)
def test_unusable_settings_are_a_one_line_error(
    settings: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sglang-args", *(word for each in settings for word in ("--config", each))]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
