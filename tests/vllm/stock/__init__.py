"""Runs a stock vLLM on a machine without a GPU."""
