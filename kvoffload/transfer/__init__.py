"""The copies of one rank: between device and host memory, and between host memory and the lower tiers.

Reading order: `ports` (interfaces), `layout` and `arena` (where bytes are), `runs` (what to copy), the copiers
(`host_copier`, `cuda`), and `pump` (when to copy). For the lower tiers: `blocking_calls`, `tier_jobs`, `disk` and
`remote`. Nothing here imports torch or CUDA before a CUDA device is used.
"""
