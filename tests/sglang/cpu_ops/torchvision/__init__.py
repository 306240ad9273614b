"""Stands in for torchvision, which SGLang's modules for pictures import. Text needs nothing of it."""

from sglang_cpu_ops.absent import stand_in

__version__ = "0.0"  # transformers wants one that it can compare

stand_in(__name__)
