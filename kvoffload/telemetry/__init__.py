"""Metrics, logs, the journal, spans and traces for operators. This package only observes and decides nothing."""
