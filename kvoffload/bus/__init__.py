"""Typed publish and subscribe: inline handlers for state and counters, bounded feeds for observers.

`sleeper` is the sleep of a coroutine that waits for another thread.
"""
