"""The models that tests run. SGLang imports every module of this package; its own package has hundreds."""
