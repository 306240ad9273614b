"""What operators see: metrics, logs and the journal. Everything here listens; nothing here decides."""
