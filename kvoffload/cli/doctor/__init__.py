"""`kvoffload doctor`: the checks of `kvoffload.checks` and of the adapters, with findings and remedies."""
