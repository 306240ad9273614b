from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from kvoffload.cli.main import main
from kvoffload.model.config import SETTINGS, parse_config
from kvoffload.model.errors import ConfigError
from tests.tooling.scripts import ROOT


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_every_key_is_listed_with_its_default_meaning_and_values(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["settings"]) == 0
    said = capsys.readouterr().out
    flat = " ".join(said.split())
    for name, one in SETTINGS.items():
        assert f"{name} {one.default} {one.meaning} {one.allowed}" in flat
    assert max(map(len, said.splitlines())) <= min(columns, 100)


def test_a_terminal_that_says_it_has_one_column_gets_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert main(["settings", "host_bytes"]) == 0
    assert capsys.readouterr().out.startswith("host_bytes ")


def test_keys_for_special_cases_come_last_under_their_own_heading(capsys: pytest.CaptureFixture[str]) -> None:
    main(["settings"])
    common, advanced = capsys.readouterr().out.split("\nAdvanced")
    assert "\nremote_url " in common
    for name in ("transfer_timeout_s", "layout", "batch_copies"):
        assert f"\n{name} " in advanced
        assert f"\n{name} " not in common


@pytest.mark.parametrize("keys", [["disk_bytes"], ["host_bytes", "layout"]])
def test_only_the_named_settings_are_listed(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", *keys]) == 0
    said = capsys.readouterr().out
    assert [name for name in SETTINGS if re.search(rf"^{name} ", said, re.M)] == keys


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["disk_byte"], "unknown setting 'disk_byte'; did you mean disk_bytes?"),
        (["zzz"], "known are host_bytes, "),
        (["--json", "--from", "{}"], "--from takes neither KEY nor --json"),
    ],
)
def test_a_wrong_choice_of_settings_is_an_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["settings", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def accepts(schema: dict[str, Any], settings: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(settings))


def test_the_schema_describes_every_setting(schema: dict[str, Any]) -> None:
    for name, one in SETTINGS.items():
        assert schema["properties"][name]["description"] == one.meaning
        assert schema["properties"][name]["title"] == one.allowed
    assert "\\\\Z" not in json.dumps(schema)  # Python's end of a text, which other languages do not know


def test_the_schema_accepts_the_documents_examples(schema: dict[str, Any]) -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/kvoffload_vllm/**/*.*")]
    texts = (page.read_text(encoding="utf-8", errors="ignore") for page in pages)
    shown = [
        one
        for text in texts
        for one in re.findall(r'"kv_connector_extra_config": ?(\{"host_bytes"[^{}]*\})', text)
    ]
    assert len(shown) > 8
    assert [one for one in shown if not accepts(schema, json.loads(one))] == []


@pytest.mark.parametrize(
    "more",
    [
        *({"host_bytes": size} for size in (1, "64GiB", "1.5 tib", "8kb", " 3 ", "7B", 0, -1, "64K", "GiB", "lots", "", None, True)),
        *({"store_policy": one} for one in ("lazy", "Lazy", "lazy2", 1)),
        *({"min_load_tokens": one} for one in ("auto", 0, 64, -1, "64")),
        *({"remote_url": one} for one in ("s3://bucket/x", "mooncake://h:1?protocol=tcp", "s3://a@b", "http://x")),
        *({"transfer_timeout_s": one} for one in (1, 0.5, 0, 1e10, "1")),
        *({"recurrent_prefix_boundaries": one} for one in (True, "true")),
        *({"disk_path": one} for one in ("/a", 3)),
        {"unknown": 1},
    ],
)  # fmt: skip
def test_the_schema_accepts_what_an_engine_accepts(more: dict[str, object], schema: dict[str, Any]) -> None:
    settings = {"host_bytes": "1GiB", **more}
    try:
        parse_config(settings)
    except ConfigError:
        assert not accepts(schema, settings)
    else:
        assert accepts(schema, settings)
