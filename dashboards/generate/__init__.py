"""Writes the dashboards, the alerting rules and the runbook. Only the module `grafana` uses Grafana's terms."""
