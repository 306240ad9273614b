"""Dashboards and alerts for operators. Not part of the wheel."""
