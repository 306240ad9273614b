"""Blocks on a local disk: one file of slots a rank, and a log that says which block each slot holds. Starts no thread."""
