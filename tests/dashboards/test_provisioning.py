"""Checks that the files that start Prometheus and Grafana are consistent. No container is started."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dashboards.generate.files import FOLDER

COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())
PROVISIONING = FOLDER / "grafana" / "provisioning"


def load(path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = yaml.safe_load(path.read_text())
    return plain


def mounts(service: str) -> dict[PurePosixPath, Path]:
    """Return the mounted paths of this repository, by their paths in the container."""
    pairs = [volume.split(":")[:2] for volume in COMPOSE["services"][service]["volumes"]]
    return {PurePosixPath(there): FOLDER / here for here, there in pairs if here.startswith(".")}


def resolve(service: str, path: str) -> Path:
    for there, here in mounts(service).items():
        if PurePosixPath(path).is_relative_to(there):
            return here / PurePosixPath(path).relative_to(there)
    raise AssertionError(f"{path} is not mounted in {service}")


def test_mounted_paths_exist_volumes_are_declared_and_images_are_pinned() -> None:
    used = set[str]()
    for name, service in COMPOSE["services"].items():
        assert all(here.exists() for here in mounts(name).values())
        assert service["image"].rpartition(":")[2][-1].isdigit()
        used |= {volume.split(":")[0] for volume in service["volumes"]}
    assert {name for name in used if not name.startswith(".")} == set(COMPOSE["volumes"])


def test_prometheus_finds_its_configuration_and_rules() -> None:
    command = COMPOSE["services"]["prometheus"]["command"]
    (config,) = [PurePosixPath(word[14:]) for word in command if word.startswith("--config.file=")]
    for rules in load(resolve("prometheus", str(config)))["rule_files"]:
        assert resolve("prometheus", str(config.parent / rules)).exists()


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    listens = [one for one in COMPOSE["services"]["prometheus"]["command"] if "listen-address" in one]
    assert listens == [f"--web.listen-address={source['url'].removeprefix('http://')}"]
    assert source["type"] == "prometheus"
    interval = load(FOLDER / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = load(PROVISIONING / "dashboards" / "kvoffload.yml")["providers"]
    found = resolve("grafana", provider["options"]["path"]).iterdir()
    assert {path.suffix for path in found} == {".json"}
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert resolve("grafana", environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).exists()
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
