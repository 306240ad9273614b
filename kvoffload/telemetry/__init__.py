"""What operators see: metrics, logs, the journal, spans and traces. Nothing here decides."""
