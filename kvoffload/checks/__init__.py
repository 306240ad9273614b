"""Checks of a machine and settings, each with a finding and a remedy.

`check` defines the types; `memory` and `outputs` contain the checks. An engine's own checks come with its adapter.
`kvoffload doctor` runs the checks before a start, and `startup` runs some of these checks when an engine starts.
"""
