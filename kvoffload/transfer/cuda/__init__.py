"""Copies between a CUDA device and the host.

Reading order: `library` (NVIDIA's driver library by ctypes), `driver` (one device), `copier` (two streams of batches),
`page_kernel` (short copies), `crossover` (which copies are short). Only `page_kernel` needs triton, and nothing torch.
"""
