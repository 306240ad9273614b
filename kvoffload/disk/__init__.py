"""Blocks on a local disk: one slot file per rank, and a log of which block each slot holds. Starts no thread."""
