"""Runs every query of every panel and rule against a real Prometheus that scrapes real engines."""
