from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.generate.boards import BOARDS
from dashboards.generate.files import FOLDER
from dashboards.generate.rules import ALERTS, Alert
from kvoffload.telemetry.catalogue import CATALOGUE
from tests.dashboards.queries import metrics_in, rule_expressions

RULES = FOLDER / "rules"
SEVERITIES = {"critical", "warning", "info"}
ANNOTATIONS = {"summary", "description", "runbook", "runbook_url", "dashboard_url"}


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / f"{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.tools("promtool")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules/tests/alerts.yml")


@pytest.mark.tools("promtool")
def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    said = promtool("check", "config", "prometheus.yml")
    assert f"{len(rules('alerts'))} rules found" in said


def test_every_alert_and_every_recorded_number_is_tested() -> None:
    tested = (RULES / "tests" / "alerts.yml").read_text()
    wanted = [f'alertname="{rule["alert"]}"' for rule in rules("alerts")]
    wanted += [rule["record"] for rule in rules("recording")]
    assert [name for name in wanted if name not in tested] == []


def test_every_alert_has_a_severity_and_says_what_to_do() -> None:
    for rule in rules("alerts"):
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]
        assert set(rule["annotations"]) == ANNOTATIONS, rule["alert"]
        assert "$labels.instance" in rule["annotations"]["description"], rule["alert"]
        assert len(rule["annotations"]["runbook"].split()) >= 30, rule["alert"]
    # Only alerts about danger to serving are critical.
    assert [alert.name for alert in ALERTS if alert.severity == "critical"] == ["CopiesStalled", "JobStuck"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_each_runbook_entry_gives_meaning_effect_checks_and_remedy(alert: Alert) -> None:
    runbook = (FOLDER / "RUNBOOK.md").read_text()
    section = runbook.partition(f"## {alert.full_name}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\* \*\*(\w+)\*\*: \S", section, re.MULTILINE) == ["Meaning", "Impact", "Check", "Do"]
    for text in (alert.meaning, alert.impact, alert.check, alert.do):
        assert text[0].isupper() or text[0] in "0`" or text.split(":")[0].islower()
        assert text.endswith(".")
    assert re.match("Users notice nothing|First tokens|Requests may hang|Each step", alert.impact)


def test_the_runbook_has_every_alert() -> None:
    headings = re.findall("^## (.*)$", (FOLDER / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules("alerts")]


def test_every_rule_keeps_the_labels_of_its_engine_and_names_no_engine() -> None:
    """Aggregations may only drop a metric's own labels: alerts are routed by namespace, pod and cluster."""
    own = {label.name for metric in CATALOGUE for label in metric.labels}
    for expr in rule_expressions():
        assert metrics_in(expr)
        assert 'job="' not in expr
        assert 'instance="' not in expr
        assert not re.search(r"\bby\b|\bon\b|\bignoring\b", expr), expr
        for removed in re.findall(r"without \(([^)]*)\)", expr):
            assert set(removed.split(", ")) <= own, expr


@pytest.mark.slow
@pytest.mark.tools("promtool")
def test_an_alert_links_to_the_runbook_and_to_the_engines_dashboard(tmp_path: Path) -> None:
    series = 'kvoffload_degraded{namespace="blue", pod="llm-0", instance="10.0.0.1:8000", engine="3", cause="invariant_broken"}'
    (degraded,) = [alert for alert in ALERTS if alert.full_name == "KVOffloadDegraded"]
    labels = {"namespace": "blue", "pod": "llm-0", "instance": "10.0.0.1:8000", "engine": "3"}
    annotations = {
        "summary": degraded.summary,
        "description": "llm-0, engine 3: offloading switched itself off (invariant_broken); the engine recomputes every prompt.",
        "runbook": degraded.to_rule()["annotations"]["runbook"],  # type: ignore[index]
        "runbook_url": "https://wiki/runbook.md#kvoffloaddegraded",
        "dashboard_url": "http://127.0.0.1:3000/d/kvoffload-overview?var-namespace=blue&var-pod=llm-0"
        "&var-instance=10.0.0.1%3A8000&var-engine=3",
    }
    expected = {
        "exp_labels": {**labels, "cause": "invariant_broken", "severity": "warning"},
        "exp_annotations": annotations,
    }
    test = {
        "interval": "1m",
        "external_labels": {"kvoffload_runbook_url": "https://wiki/runbook.md"},
        "input_series": [{"series": series, "values": "1x5"}],
        "alert_rule_test": [{"eval_time": "3m", "alertname": degraded.full_name, "exp_alerts": [expected]}],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES / "alerts.yml")], "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def test_an_alerts_dashboard_exists_and_shows_its_tier() -> None:
    tiers = {board.name: set(board.tiers) for board in BOARDS}
    for alert in ALERTS:
        assert alert.tier in (tiers[alert.board] or {""}), alert.name
        url = alert.to_rule()["annotations"]["dashboard_url"]  # type: ignore[index]
        assert f"/kvoffload-{alert.board}?{alert.tier and f'var-tier={alert.tier}&'}{{{{" in url
