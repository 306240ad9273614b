"""Prints a software bill of materials (CycloneDX 1.6, JSON): the wheel, and all that it needs, in the versions of the lock.

The names come from the metadata of the packages in this environment, beginning with the wheel's requirements and extras;
the versions come from requirements.lock. The same lock gives the same text.
"""

import json
import tomllib
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def needed(wanted: list[str], pins: dict[str, str]) -> dict[str, set[str]]:
    """Return each package in the lock that the requirements need, with the names of those that it needs itself."""
    found: dict[str, set[str]] = {}
    left = [Requirement(line) for line in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name not in pins or (name, frozenset(requirement.extras)) in seen:
            continue  # not in the lock: for another platform
        seen.add((name, frozenset(requirement.extras)))
        own = [
            one for one in requirements_of(name, requirement.extras) if canonicalize_name(one.name) in pins
        ]
        found.setdefault(name, set()).update(canonicalize_name(one.name) for one in own)
        left += own
    return found


def requirements_of(name: str, extras: set[str]) -> list[Requirement]:
    """Return the requirements of an installed package that apply to this platform."""
    all_of_them = [Requirement(line) for line in metadata.requires(name) or []]
    return [
        one
        for one in all_of_them
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def bill(project: dict[str, Any], pins: dict[str, str]) -> dict[str, Any]:
    """Return the bill of materials of a project, by its `[project]` table and the lock's versions."""
    wanted = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    found = needed(wanted, pins)
    purls = {name: f"pkg:pypi/{name}@{pins[name]}" for name in found}
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    direct = {canonicalize_name(Requirement(line).name) for line in wanted} & found.keys()
    component = {
        "type": "library",
        "bom-ref": own,
        "name": project["name"],
        "version": project["version"],
        "purl": own,
    }
    licence = [{"license": {"id": project["license"]}}]
    edges: dict[str, set[str]] = {own: {*direct}, **{purls[name]: found[name] for name in sorted(found)}}
    content: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**component, "licenses": licence}},
        "components": [
            {
                "type": "library",
                "bom-ref": purls[name],
                "name": name,
                "version": pins[name],
                "purl": purls[name],
            }
            for name in sorted(found)
        ],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(purls[name] for name in names)} for ref, names in edges.items()
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {**content, "serialNumber": f"urn:uuid:{serial}"}


def read_pins() -> dict[str, str]:
    lines = (ROOT / ".ci" / "requirements.lock").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(json.dumps(bill(project, read_pins()), indent=1))


if __name__ == "__main__":
    main()
