"""Every alert, in the order of the runbook."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dashboards.generate.rules import Alert

ALERTS = msgspec.yaml.decode(Path(__file__).with_name("alerts.yml").read_bytes(), type=tuple[Alert, ...])
