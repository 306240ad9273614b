"""A stock vLLM on a machine without a GPU: its installer, small checkpoints, engines, and the peer connector."""
