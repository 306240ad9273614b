from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from tests.tooling.scripts import ROOT

if TYPE_CHECKING:
    import pytest

SOURCE = ROOT / "dashboards"
BOARDS = sorted((SOURCE / "grafana" / "dashboards").glob("*.json"))
RULES = ("recording", "alerts")


def export(folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert main(["dashboards", "export", str(folder)]) == Exit.OK
    printed = set(capsys.readouterr().out.split())
    found = {str(path) for path in folder.rglob("*") if path.is_file()}
    assert printed == found
    return {str(Path(name).relative_to(folder)) for name in found}


def test_each_export_writes_the_files_of_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    names = export(folder, capsys)
    assert names == export(folder, capsys)
    assert names == {
        "RUNBOOK.md",
        *(f"grafana/{board.name}" for board in BOARDS),
        *(f"prometheus/{name}.yml" for name in RULES),
        *(f"kubernetes/{name}.prometheusrule.yaml" for name in RULES),
        *(f"kubernetes/{board.stem}.configmap.yaml" for board in BOARDS),
    }
    assert (folder / "RUNBOOK.md").read_text() == (SOURCE / "RUNBOOK.md").read_text()
    for board in BOARDS:
        assert json.loads((folder / "grafana" / board.name).read_text()) == json.loads(board.read_text())


def test_the_kubernetes_objects_contain_the_same_files_and_can_be_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path, capsys)
    folder = tmp_path / "kubernetes"
    for path in folder.iterdir():
        # kubectl stores the object as JSON in an annotation, and an object's annotations are limited to 256 KiB
        # in total.
        assert len(json.dumps(yaml.safe_load(path.read_text()))) < 200_000, path.name
    for name in RULES:
        rule = yaml.safe_load((folder / f"{name}.prometheusrule.yaml").read_text())
        assert (rule["kind"], rule["apiVersion"]) == ("PrometheusRule", "monitoring.coreos.com/v1")
        assert rule["spec"] == yaml.safe_load((SOURCE / "rules" / f"{name}.yml").read_text())
    for board in BOARDS:
        found = yaml.safe_load((folder / f"{board.stem}.configmap.yaml").read_text())
        assert (found["kind"], found["apiVersion"]) == ("ConfigMap", "v1")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = found["data"].items()
        assert name == f"{found['metadata']['name']}.json" == f"kvoffload-{board.name}"
        assert json.loads(text) == json.loads(board.read_text())


def test_a_folder_that_cannot_be_created_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["dashboards", "export", str(tmp_path / "file" / "folder")]) == Exit.OUTPUT
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
