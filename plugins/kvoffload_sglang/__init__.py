"""Adapter for SGLang: offers kvoffload's disk tier and remote tier as a storage backend below HiCache's host memory."""
