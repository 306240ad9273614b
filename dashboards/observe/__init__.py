"""Checks every query of every panel and rule: a real Prometheus evaluates them while it scrapes real engines."""
