"""Checks the queries of all panels and rules in a real Prometheus that scrapes real engines."""
