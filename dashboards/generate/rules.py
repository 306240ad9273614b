"""Alerts: the rules for Prometheus, and the sections of the runbook. A rule's annotations repeat the alert's section.

A rule keeps the labels of its series. So an alert is about one engine, and can be routed by namespace, pod or cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

_HEAD = """# Written by `make dashboards` from generate/; do not edit.
# critical: look now, serving is in danger. warning: today. info: when there is time; nothing is broken.
# Set the external labels `kvoffload_runbook_url` and `grafana_url` in prometheus.yml, so that an alert links to your copies.
"""
_WHERE = "{{ or $labels.pod $labels.instance }}{{ with $labels.engine }}, engine {{ . }}{{ end }}"
_RUNBOOK = '{{ or $externalLabels.kvoffload_runbook_url "RUNBOOK.md" }}'
_GRAFANA = '{{ or $externalLabels.grafana_url "http://127.0.0.1:3000" }}'
_VARIABLES = ("namespace", "pod", "instance", "engine")


class Alert(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One alert.

    Args:
        name: the rule's name, without the prefix of all rules.
        severity: critical, warning or info.
        expr: an expression in PromQL. The alert fires for each series in the result.
        summary: the problem in a few words, without a full stop.
        description: the problem with numbers. The rule's annotation puts the engine's name before the description.
        meaning: the event behind the alert, and its causes.
        impact: the consequences for users and for the cache.
        query: a query in PromQL that shows details.
        check: the meaning of the query's result, and further places to look.
        do: the remedy.
        board: the name of the dashboard that shows the problem.
        tier: the value of the dashboard's variable `tier`; empty if the dashboard does not have this variable.
        wait: the time for which the expression must return a series before the alert fires, such as `5m`.
    """

    name: str
    severity: str
    expr: str
    summary: str
    description: str
    meaning: str
    impact: str
    query: str
    check: str
    do: str
    board: str
    tier: str = ""
    wait: str = ""

    @property
    def full_name(self) -> str:
        """The rule's name in Prometheus, with the prefix."""
        return f"KVOffload{self.name}"

    @property
    def runbook(self) -> dict[str, str]:
        """The parts of the alert's section in the runbook, by heading."""
        check = f"`{self.query}`. {self.check}"
        return {"Meaning": self.meaning, "Impact": self.impact, "Check": check, "Do": self.do}

    def to_rule(self) -> dict[str, object]:
        """Return the alert as a rule for Prometheus."""
        filters = [f"var-tier={self.tier}"] if self.tier else []
        filters += [
            f"{{{{ with $labels.{name} }}}}var-{name}={{{{ urlquery . }}}}{{{{ end }}}}"
            for name in _VARIABLES
        ]
        annotations = {
            "summary": self.summary,
            "description": f"{_WHERE}: {self.description}",
            "runbook": " ".join(f"{heading}: {text}" for heading, text in self.runbook.items()),
            "runbook_url": f"{_RUNBOOK}#{self.full_name.lower()}",
            "dashboard_url": f"{_GRAFANA}/d/kvoffload-{self.board}?{'&'.join(filters)}",
        }
        waits = {"for": self.wait} if self.wait else {}
        labels = {"severity": self.severity}
        return {
            "alert": self.full_name,
            "expr": self.expr,
            **waits,
            "labels": labels,
            "annotations": annotations,
        }


ALERTS = msgspec.yaml.decode(Path(__file__).with_name("alerts.yml").read_bytes(), type=tuple[Alert, ...])
"""All alerts, in the order of the runbook."""


def render_rules(alerts: Sequence[Alert]) -> str:
    """Return the content of Prometheus's file of alerting rules."""
    groups = [{"name": "kvoffload_alerts", "rules": [alert.to_rule() for alert in alerts]}]
    dumper = type("Dumper", (yaml.SafeDumper,), {})
    yaml.add_representer(str, _represent, Dumper=dumper)
    return f"{_HEAD}{yaml.dump({'groups': groups}, Dumper=dumper, sort_keys=False, width=118, allow_unicode=True)}"


def render_runbook(alerts: Sequence[Alert]) -> str:
    """Return the content of the runbook."""
    return "\n".join(_sections(alerts))


def _sections(alerts: Sequence[Alert]) -> Iterator[str]:
    yield (
        "# Runbook\n\n"
        "What to do when one of kvoffload's alerts fires. Written by `make dashboards` from `generate/`; the alerts\n"
        "carry the same text. In all of these cases the engine goes on: at worst it recomputes what it could have loaded.\n"
    )
    for alert in alerts:
        parts = "\n".join(f"* **{heading}**: {text}" for heading, text in alert.runbook.items())
        yield f"## {alert.full_name}\n\n*{alert.severity}*: {alert.summary}.\n\n{parts}\n"


def _represent(dumper: Any, text: str) -> object:  # noqa: ANN401  # the library has no types
    """Represent a string in YAML. A string with several lines becomes a block, which keeps the line breaks."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
