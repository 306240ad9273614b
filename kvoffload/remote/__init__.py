"""Clients of the remote tier: a store below host and disk that several engines share. Starts no thread."""
