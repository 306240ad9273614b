"""Adapter for the reference engine: translates the engine's hooks into facts."""
