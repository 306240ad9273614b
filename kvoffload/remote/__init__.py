"""Clients of the remote tier, which several engines share. This package starts no threads."""
