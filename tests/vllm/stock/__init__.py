"""A stock vLLM on a machine without a GPU: its installer, small checkpoints, engines to start, and the peer connector."""
