"""Computes the objects that `kubectl apply -k` would send, from resources, components' images, strategic merge patches and
images. A test of `make test-all` compares them with those of a real kubectl.
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
    for name in plan.get("components", ()):
        (component,) = load(folder / name / "kustomization.yaml")
        for image in component["images"]:
            _set_images(objects, image)
    for patch in plan.get("patches", ()):
        for change in load(folder / patch["path"]):
            (target,) = [one for one in objects if _name(one) == _name(change)]
            target.update(cast("Object", merged(target, change)))
    for image in plan.get("images", ()):
        _set_images(objects, image)
    return objects


def merged(value: object, change: object, key: str = "") -> object:
    """Return a value after a strategic merge patch."""
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {
            name: merged(value[name], part, name) if name in value else part for name, part in change.items()
        }
    if isinstance(value, list) and isinstance(change, list) and key in _KEYS:
        names = {part[_KEYS[key]]: part for part in value}
        new = [part for part in change if part[_KEYS[key]] not in names]  # kubectl puts these first
        names |= {name: merged(names[name], part) for part in change if (name := part[_KEYS[key]]) in names}
        return [*new, *names.values()]
    return change


def _name(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _set_images(value: object, image: Object) -> None:
    if isinstance(value, list):
        for one in value:
            _set_images(one, image)
    elif isinstance(value, dict):
        if str(value.get("image", "")).partition(":")[0] == image["name"]:
            value["image"] = f"{image['newName']}:{image['newTag']}"
        for one in value.values():
            _set_images(one, image)
