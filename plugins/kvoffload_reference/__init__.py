"""Offloading for the reference engine: translates its hooks into the adapter contract and decides nothing."""
