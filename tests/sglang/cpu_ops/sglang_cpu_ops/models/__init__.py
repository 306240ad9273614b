"""The models that tests run. SGLang imports every module of this package. Its own model package has hundreds."""
