"""The `kvoffload` command."""
