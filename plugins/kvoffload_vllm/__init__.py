"""Offloading for vLLM: translates its connector hooks into the adapter contract and decides nothing.

`register` is what the entry point names; `connector` has vLLM's hooks; `scheduler` and `worker` are what they do on each
side; `groups`, `layout` and `tracked` translate. Importing this package imports nothing of vLLM.
"""
