"""Simulates an engine with the plugin on one event loop, reproducibly from a seed: `python -m tests.simulate`."""
