"""Lets a missing package be imported. Every submodule and name of the package exists, but calling a name fails."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def stand_in(name: str) -> None:
    """Replace the package `name` while it is being imported."""
    sys.modules[name].__class__ = _Absent
    sys.meta_path.append(_Finder(name))


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"

        def refuse(self: object, *_: object, **__: object) -> None:
            raise NotImplementedError(f"{full} is not here: this machine has no GPU")

        return _Members(name, (), {"__init__": refuse})


class _Members(type):
    """The metaclass of all imported names. SGLang uses some as enumerations, so any attribute is a member's name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Finder:
    """Finds any submodule of a package, because each version of SGLang imports different ones."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if not name.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has no code."""
