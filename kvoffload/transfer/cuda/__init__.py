"""Copies between a CUDA device and the host.

Reading order: `library` (NVIDIA's driver library through ctypes), `driver` (one device), `copier` (batches on two
streams), `page_kernel` (short copies), `crossover` (which copies count as short). Only `page_kernel` needs triton.
None needs torch.
"""
