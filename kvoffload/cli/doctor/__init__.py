"""`kvoffload doctor`: the checks of `kvoffload.checks` and of the adapters, one line each, with the remedy."""
