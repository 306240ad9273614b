from __future__ import annotations

import pytest

from kvoffload.cli.main import main
from kvoffload.model.config import SETTINGS


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


def test_keys_for_special_cases_come_last_under_their_own_heading(capsys: pytest.CaptureFixture[str]) -> None:
    main(["settings"])
    common, advanced = capsys.readouterr().out.split("\nAdvanced")
    assert "\nremote_url " in common
    for name in ("transfer_timeout_s", "layout", "batch_copies"):
        assert f"\n{name} " in advanced
        assert f"\n{name} " not in common
