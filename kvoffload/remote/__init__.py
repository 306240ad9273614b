"""Clients of the remote tier, a store that several engines share. Starts no thread."""
