"""Computes the objects that `kubectl apply -k` would send, from resources, strategic merge patches and
images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml

Object = dict[str, Any]

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
"""A patch merges these lists by the named field, and replaces all other lists."""


def load(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def build(folder: Path) -> list[Object]:
    (plan,) = load(folder / "kustomization.yaml")
    objects: list[Object] = []
    for name in plan["resources"]:
        resource = folder / name
        objects += build(resource) if resource.is_dir() else load(resource)
    for patch in plan.get("patches", ()):
        for change in load(folder / patch["path"]):
            (target,) = [one for one in objects if _name(one) == _name(change)]
            target.update(cast("Object", merged(target, change)))
    for image in plan.get("images", ()):
        for one in objects:
            _set_image(one, image)
    return objects


def merged(value: object, change: object, key: str = "") -> object:
    """Return a value after a strategic merge patch."""
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {
            name: merged(value[name], part, name) if name in value else part for name, part in change.items()
        }
    if isinstance(value, list) and isinstance(change, list) and key in _KEYS:
        names = {part[_KEYS[key]]: part for part in value}
        for part in change:
            name = part[_KEYS[key]]
            names[name] = merged(names[name], part) if name in names else part
        return list(names.values())
    return change


def _name(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _set_image(value: object, image: Object) -> None:
    if isinstance(value, list):
        for one in value:
            _set_image(one, image)
    elif isinstance(value, dict):
        if str(value.get("image", "")).partition(":")[0] == image["name"]:
            value["image"] = f"{image['newName']}:{image['newTag']}"
        for one in value.values():
            _set_image(one, image)
