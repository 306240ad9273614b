"""Whole lives of an engine with the plugin on one event loop, each from one number: `python -m tests.simulate`."""
