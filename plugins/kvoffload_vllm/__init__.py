"""Offloading for vLLM: translates its connector hooks into the adapter contract and decides nothing.

`register` is the entry point; `connector` has the class that vLLM loads; `scheduler` and `worker` implement its hooks
on each side; `groups`, `layout` and `progress` translate. Importing this package does not import vLLM.
"""
