"""Rules, as promtool sees them, and the text that alerts carry."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from dashboards.generate.files import FOLDER
from tests.dashboards.queries import metrics_in, rule_expressions

RULES = FOLDER / "rules"
SEVERITIES = {"critical", "warning", "info"}


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
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    said = promtool("check", "config", "prometheus.yml")
    assert f"{len(rules('alerts'))} rules found" in said


def test_every_alert_is_tested() -> None:
    tested = (RULES / "tests" / "alerts.yml").read_text()
    assert [rule["alert"] for rule in rules("alerts") if f'alertname="{rule["alert"]}"' not in tested] == []


def test_every_recorded_number_is_tested() -> None:
    tested = (RULES / "tests" / "alerts.yml").read_text()
    assert [rule["record"] for rule in rules("recording") if rule["record"] not in tested] == []


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules("alerts"):
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        assert "$labels.instance" in rule["annotations"]["description"], rule["alert"]
        assert len(rule["annotations"]["runbook"].split()) >= 30, rule["alert"]


def test_the_runbook_has_every_alert() -> None:
    runbook = (FOLDER / "RUNBOOK.md").read_text()
    assert [line[3:] for line in runbook.splitlines() if line.startswith("## ")] == [
        rule["alert"] for rule in rules("alerts")
    ]


def test_no_rule_speaks_of_a_job_or_an_instance_by_name() -> None:
    for expr in rule_expressions():
        assert metrics_in(expr)
        assert 'job="' not in expr
        assert 'instance="' not in expr


def test_alerts_say_which_instance() -> None:
    """Whatever they compute keeps the instance, or the annotation could not name it."""
    for rule in rules("alerts"):
        assert "instance" in rule["expr"], rule["alert"]
