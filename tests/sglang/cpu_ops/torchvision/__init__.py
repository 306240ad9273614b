"""Replaces torchvision, which SGLang's image modules import. Text models do not call it."""

from sglang_cpu_ops.absent import stand_in

__version__ = "0.0"  # transformers compares the version when it is imported

stand_in(__name__)
