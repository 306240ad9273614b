"""Writes the dashboards and the runbook. Panels are described independently of Grafana, and rendered in one place."""
