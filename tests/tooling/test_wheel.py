import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.tooling.scripts import ROOT, unpacked_wheel

SOURCES = (".py", ".ptx")
FUNCTIONS = {
    "kvoffload.commands": ("add_arguments", "run"),
    "kvoffload.doctors": ("add_arguments", "read_arguments"),
    "kvoffload.gpu_checks": ("lines",),
}
PACKAGES = ["kvoffload", *sorted(path.parent.name for path in ROOT.glob("plugins/*/__init__.py"))]


@pytest.fixture
def wheel() -> Path:
    return unpacked_wheel()


@pytest.fixture
def metadata(wheel: Path) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(name="kvoffload", path=[str(wheel)])
    return found


def sources(root: Path, package: str) -> set[str]:
    return {str(path.relative_to(root)) for path in (root / package).rglob("*") if path.suffix in SOURCES}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tests_run_against_the_wheel(package: str, wheel: Path) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin == str(wheel / package / "__init__.py")


def test_the_wheel_contains_every_module_and_no_other_code(wheel: Path) -> None:
    expected = sources(ROOT, "kvoffload").union(*(sources(ROOT / "plugins", name) for name in PACKAGES[1:]))
    found = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.suffix in SOURCES}
    assert found == expected
    assert [name for name in PACKAGES if not (wheel / name / "py.typed").exists()] == []


def test_the_wheel_contains_the_files_of_the_dashboards_command_and_only_its_packages_and_metadata(
    wheel: Path, metadata: importlib.metadata.Distribution
) -> None:
    folder = wheel / "kvoffload" / "dashboards"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    boards = {f"grafana/dashboards/{path.name}" for path in ROOT.glob("dashboards/grafana/dashboards/*")}
    assert found == {"RUNBOOK.md", "rules/alerts.yml", "rules/recording.yml", *boards}
    tops = {path.parts[0] for path in metadata.files or []}
    tops -= {"..", "bin"}  # pip puts the `kvoffload` command into bin
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tops == {*PACKAGES, f"kvoffload-{version}.dist-info"}


def test_every_entry_point_can_be_loaded(metadata: importlib.metadata.Distribution) -> None:
    points = {(point.group, point.name): point for point in metadata.entry_points}
    assert {("console_scripts", "kvoffload"), ("kvoffload.engine_plugins", "kvoffload")} <= set(points)
    for (group, _), point in points.items():
        if group in FUNCTIONS:
            module = point.load()
            assert all(callable(getattr(module, name)) for name in FUNCTIONS[group]), point
        elif not group.startswith("vllm."):
            assert callable(point.load()), point


def test_requirements_have_lower_bounds_only_and_the_licence_is_included(
    metadata: importlib.metadata.Distribution,
) -> None:
    requirements = [Requirement(line) for line in metadata.requires or []]
    assert "torch" in {requirement.name for requirement in requirements}
    for requirement in requirements:
        assert requirement.url is None
        assert {bound.operator for bound in requirement.specifier} == {">="}, requirement
    assert "Apache License" in (metadata.read_text("licenses/LICENSE") or "")
