"""The models that tests run. SGLang imports every module of a package of models, and its own has hundreds."""
