"""Benches: measurements on this machine."""
