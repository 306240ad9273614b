"""The models that tests run. SGLang imports every module of a model package, and its own package has
hundreds.
"""
