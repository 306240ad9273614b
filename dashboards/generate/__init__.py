"""Writes the dashboards and the runbook. Panels are described without Grafana's terms; one module renders them."""
