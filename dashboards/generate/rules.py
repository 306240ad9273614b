"""Alerts: their rules for Prometheus, and their sections in the runbook. An alert's annotations repeat its section.

Rules keep the labels of their series. So an alert is about one engine and can be routed by namespace, pod or cluster.
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
        name: the rule's name, without the prefix that all rules have.
        severity: critical, warning or info.
        expr: the alert's expression in PromQL. The alert fires while it returns a series.
        summary: what is wrong, without a full stop.
        description: what is wrong, with numbers. The engine's name is put before it.
        meaning: what happened, and why.
        impact: what users notice, and what is lost.
        query: a query in PromQL that shows details.
        check: what the query's result means, and where else to look.
        do: what the operator should do.
        board: the dashboard that shows the problem.
        tier: the value to choose for the dashboard's variable `tier`, if the dashboard has this variable.
        wait: how long the expression must return a series before the alert fires.
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
        """The rule's name in Prometheus."""
        return f"KVOffload{self.name}"

    @property
    def runbook(self) -> dict[str, str]:
        """The four parts of the alert's section in the runbook, by their headings."""
        check = f"`{self.query}`. {self.check}"
        return {"Meaning": self.meaning, "Impact": self.impact, "Check": check, "Do": self.do}

    def to_rule(self) -> dict[str, object]:
        """Return the alert's entry in the file of rules."""
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
    """Return the file with the alerting rules for Prometheus."""
    groups = [{"name": "kvoffload_alerts", "rules": [alert.to_rule() for alert in alerts]}]
    dumper = type("Dumper", (yaml.SafeDumper,), {})
    yaml.add_representer(str, _represent, Dumper=dumper)
    return f"{_HEAD}{yaml.dump({'groups': groups}, Dumper=dumper, sort_keys=False, width=118, allow_unicode=True)}"


def render_runbook(alerts: Sequence[Alert]) -> str:
    """Return the runbook, which has a section for each alert."""
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
    """Represent a text in YAML. Texts of several lines keep their line breaks."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
