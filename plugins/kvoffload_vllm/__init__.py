"""Adapter for vLLM: translates vLLM's connector hooks into facts, and plans into vLLM's messages.

`register` is the entry point. `connector` has the class that vLLM loads; `scheduler` and `worker` implement the hooks
on each side; `groups`, `layout` and `progress` translate vLLM's data. Importing this package does not import vLLM.
"""
