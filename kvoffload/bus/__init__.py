"""Typed publish and subscribe: inline handlers for state and counters, bounded feeds for observers."""
