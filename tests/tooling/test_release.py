"""Builds what a release consists of from clean clones: the sdist, the wheel, and the bill of materials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tooling.scripts import ROOT, load_script

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"{PROJECT['name']}-{PROJECT['version']}"

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")


def build(folder: Path, mask: int) -> Path:
    """Clone the checkout, and return a folder with the wheel and the sdist built from the clone.

    Args:
        folder: where to clone to; the path must not change what is built.
        mask: the process's file mode mask, which must not change it either.
    """
    (folder / "deep").mkdir(parents=True)
    clone, built = folder / "deep" / "clone", folder / "built"
    for command in (
        ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)],
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(clone)],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.umask(mask) and None
        )
        assert done.returncode == 0, done.stderr or done.stdout
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("one"), 0o022)


@needs_git
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_clones_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "another", 0o077)
    names = {f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl"}
    assert {path.name for path in built.iterdir()} == names
    assert [name for name in names if (built / name).read_bytes() != (other / name).read_bytes()] == []


@needs_git
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_wheel_of_the_sdist_runs_and_its_metadata_is_valid(built: Path, tmp_path: Path) -> None:
    wheel = built / f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        metadata = Metadata.from_email(file.read(f"{NAME}.dist-info/METADATA"), validate=True)
        assert "kvoffload_vllm/deploy/kubernetes/image/kustomization.yaml" in file.namelist()
        file.extractall(tmp_path)
    assert (metadata.description_content_type, metadata.license_expression) == ("text/markdown", "Apache-2.0")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "kvoffload", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"kvoffload {PROJECT['version']}\n"


@needs_git
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_sdist_has_what_is_needed_to_build_and_test(built: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(built / f"{NAME}.tar.gz") as file:
        found = {name.partition("/")[2] for name in file.getnames()}
    missing = {name for name in tracked.stdout.splitlines() if not name.startswith("findings/")} - found
    assert missing == set()
    assert found - set(tracked.stdout.splitlines()) == {"PKG-INFO"}


def test_the_version_is_the_changelogs_first() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if line.startswith("## ")).split()[1] == PROJECT["version"]


def test_the_bill_of_materials_has_every_requirement_in_the_locks_version() -> None:
    script = load_script("sbom")
    pins = script.read_pins()
    bill = script.bill(PROJECT, pins)
    assert json.dumps(bill) == json.dumps(script.bill(PROJECT, pins))
    found = {one["name"]: one["version"] for one in bill["components"]}
    extras = PROJECT["optional-dependencies"].values()
    wanted = [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]
    assert {canonicalize_name(Requirement(line).name) for line in wanted} <= found.keys()
    assert {"certifi", "jinja2"} <= found.keys()  # what requirements require
    assert not {"pytest", "ruff", "sphinx"} & found.keys()  # what only development needs
    assert {name: pins[name] for name in found} == found
    refs = {bill["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in bill["components"])}
    assert {one["ref"] for one in bill["dependencies"]} == refs
    assert {ref for one in bill["dependencies"] for ref in one["dependsOn"]} < refs
