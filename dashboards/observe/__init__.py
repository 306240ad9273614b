"""Evaluates every query of every panel and rule in a real Prometheus that scrapes real engines."""
