"""Copies between the device and host memory: layouts, the arena, copiers, and the pump that drives them.

Reading order: `ports` (what is handed in), `layout` and `arena` (where bytes lie), `runs` (what to copy), the copiers
(`host_copier`, `cuda`), and `pump` (when). Nothing here imports torch or CUDA before a CUDA device is asked for.
"""
