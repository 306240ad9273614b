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


def test_every_mounted_path_exists() -> None:
    for service in COMPOSE["services"]:
        assert all(here.exists() for here in mounts(service).values())


def test_named_volumes_are_declared() -> None:
    used = {volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]}
    assert {name for name in used if not name.startswith(".")} == set(COMPOSE["volumes"])


def test_images_are_pinned() -> None:
    for service in COMPOSE["services"].values():
        assert service["image"].rpartition(":")[2][-1].isdigit()


def test_prometheus_finds_its_configuration_and_rules() -> None:
    (option,) = [
        one for one in COMPOSE["services"]["prometheus"]["command"] if one.startswith("--config.file=")
    ]
    config = PurePosixPath(option.partition("=")[2])
    for rules in load(resolve("prometheus", str(config)))["rule_files"]:
        assert resolve("prometheus", str(config.parent / rules)).exists()


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    listens = [one for one in COMPOSE["services"]["prometheus"]["command"] if "listen-address" in one]
    assert listens == [f"--web.listen-address={source['url'].removeprefix('http://')}"]
    assert source["type"] == "prometheus"
    (provider,) = load(PROVISIONING / "dashboards" / "kvoffload.yml")["providers"]
    found = resolve("grafana", provider["options"]["path"]).iterdir()
    assert {path.suffix for path in found} == {".json"}
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert resolve("grafana", home).exists()


def test_grafana_assumes_the_scrape_interval_of_prometheus() -> None:
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    interval = load(FOLDER / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


def test_every_port_listens_only_on_the_loopback_interface() -> None:
    assert COMPOSE["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
