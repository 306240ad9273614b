"""The models that tests run, in a package of their own: SGLang imports every module of a model package, and
its own package has hundreds.
"""
