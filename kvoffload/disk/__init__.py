"""The disk tier's files: a slot file for each rank, and an index that says which block is in each slot.

This package starts no threads.
"""
