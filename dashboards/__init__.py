"""Dashboards and alerts for operators. The wheel does not contain this package."""
