"""Writes the dashboards and the runbook. Panels are described in words of our own and rendered in one place."""
