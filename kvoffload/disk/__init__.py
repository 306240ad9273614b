"""Blocks on a local disk: one slot file per rank, and a log of the block in each slot. Starts no thread."""
