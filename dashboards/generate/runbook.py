"""The runbook for people: the paragraphs that the alerts themselves carry, so that both always say the same."""

from __future__ import annotations

from pathlib import Path

import yaml

_HEAD = """# Runbook

What to do when one of kvoffload's alerts fires. Written by `make dashboards` from `rules/alerts.yml`, whose alerts carry
the same paragraphs. Whatever happens here, the engine goes on: the worst case is that it computes what it could have
loaded.
"""


def render_runbook(rules: Path) -> str:
    """Return the runbook of a file of alerting rules."""
    groups = yaml.safe_load(rules.read_text())["groups"]
    sections = [_section(rule) for group in groups for rule in group["rules"]]
    return "\n".join([_HEAD, *sections])


def _section(rule: dict[str, object]) -> str:
    labels, annotations = rule["labels"], rule["annotations"]
    assert isinstance(labels, dict)
    assert isinstance(annotations, dict)
    paragraph = " ".join(annotations["runbook"].split())
    return f"## {rule['alert']}\n\n*{labels['severity']}*: {annotations['summary']}.\n\n{paragraph}\n"
