"""Metrics, logs, the journal, spans and traces for operators."""
