"""Checks of a machine and of the settings for an engine. Each check returns a finding and a remedy.

`check` defines the types; `memory` and `outputs` contain the checks. Each engine's adapter adds its own checks.
`kvoffload doctor` runs all checks before an engine starts; `startup` runs some of these checks when it starts.
"""
