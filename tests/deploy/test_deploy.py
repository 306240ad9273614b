"""The files for clusters, as far as they can be checked without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.tooling.scripts import ROOT

FOLDER = ROOT / "plugins" / "kvoffload_vllm" / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def deployment(name: str) -> dict[str, Any]:
    (found,) = [one for one in documents(name) if one["kind"] == "Deployment"]
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(name)["spec"]["template"]["spec"]
    return spec


def containers(name: str) -> list[dict[str, Any]]:
    """The doctor's and the server's, with the arguments that the ConfigMap fills in."""
    if name == "production-stack-values.yaml":
        (model,) = documents(name)[0]["servingEngineSpec"]["modelSpec"]
        server = {"args": model["vllmConfig"]["extraArgs"], "image": f"{model['repository']}:{model['tag']}"}
        return [model["initContainer"], server]
    found = [*pod(name)["initContainers"], *pod(name)["containers"]]
    if name == "llm-d/patch-vllm.yaml":
        (image,) = documents("llm-d/kustomization.yaml")[0]["images"]
        found[1]["image"] = f"{image['newName']}:{image['newTag']}"
    maps = {one["metadata"]["name"]: one["data"] for one in documents(name) if one["kind"] == "ConfigMap"}
    for container in found:
        for variable in container.get("env", []):
            wanted = variable["valueFrom"]["configMapKeyRef"]
            value = maps[wanted["name"]][wanted["key"]]
            container["args"] = [
                argument.replace(f"$({variable['name']})", value) for argument in container["args"]
            ]
    return found


def transfer_config(container: dict[str, Any]) -> dict[str, Any]:
    text = "\n".join(container["args"])
    (found,) = re.findall(r"--kv-transfer-config[=\n](\{.*\})", text, flags=re.DOTALL)
    config: dict[str, Any] = json.loads(found)
    return config


PODS = ("kubernetes.yaml", "llm-d/patch-vllm.yaml")
ALL = (*PODS, "production-stack-values.yaml")


@pytest.mark.parametrize("document", documents("kubernetes.yaml"), ids=lambda one: str(one["kind"]))
def test_the_manifest_is_valid(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", PODS)
def test_the_pod_is_valid(name: str) -> None:
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod(name)}
    kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    whole = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one"},
        "spec": {**pod(PODS[0]), "swap": 1},
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ALL)
def test_the_doctor_gets_what_the_server_gets(name: str) -> None:
    doctor, server = containers(name)
    assert transfer_config(doctor) == transfer_config(server)
    assert doctor["image"] == server["image"]


@pytest.mark.parametrize("name", PODS)
def test_the_doctor_sees_the_servers_limits(name: str) -> None:
    doctor, server = containers(name)
    assert doctor["resources"] == server["resources"]


@pytest.mark.parametrize("name", ALL)
def test_the_doctor_is_content_with_all_but_this_machine(name: str) -> None:
    """What is not known ends the start too; here that is vLLM alone, which the image brings."""
    doctor, _ = containers(name)
    assert "--strict" in doctor["args"]
    command = [sys.executable, "-m", "kvoffload", *doctor["command"][1:], *doctor["args"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    said = {one["check"]: one["verdict"] for one in json.loads(done.stdout)["findings"]}
    wanted = (
        "settings",
        "vllm connector",
        "load failures",
        "host pool",
        "model sizes",
    )
    assert {check: said[check] for check in wanted} == dict.fromkeys(wanted, "go")
    assert {check for check, verdict in said.items() if verdict == "not known"} <= {"vllm version"}


@pytest.mark.parametrize("name", PODS)
def test_the_memory_is_the_sum_of_its_terms(name: str) -> None:
    """As the head says: host memory, weights, processes, shared memory."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    (terms,) = re.findall(
        r"^# +(\d+)Gi host_bytes \+ (\d+)Gi .* \+ (\d+)Gi .* \+ (\d+)Gi /dev/shm = (\d+)Gi$", text, re.M
    )
    host, weights, processes, shared, total = (int(one) for one in terms)
    _, server = containers(name)
    assert transfer_config(server)["kv_connector_extra_config"]["host_bytes"] == f"{host}GiB"
    (volume,) = pod(name)["volumes"]
    assert volume["emptyDir"]["sizeLimit"] == f"{shared}Gi"
    assert host + weights + processes + shared == total
    for kind in ("requests", "limits"):
        assert server["resources"][kind]["memory"] == f"{total}Gi"


def test_production_stack_asks_for_as_much_as_the_manifest() -> None:
    (model,) = documents("production-stack-values.yaml")[0]["servingEngineSpec"]["modelSpec"]
    (doctor, server), (_, plain) = containers("production-stack-values.yaml"), containers("kubernetes.yaml")
    memory = plain["resources"]["limits"]["memory"]
    assert transfer_config(server) == transfer_config(plain)
    assert {model["requestMemory"], model["limitMemory"], doctor["resources"]["limits"]["memory"]} == {memory}


def test_production_stack_leaves_prefix_caching_on() -> None:
    """The chart passes `--no-enable-prefix-caching` unless told otherwise."""
    (model,) = documents("production-stack-values.yaml")[0]["servingEngineSpec"]["modelSpec"]
    assert model["vllmConfig"]["enablePrefixCaching"] is True


def test_each_head_says_what_was_not_validated() -> None:
    files = [path for path in FOLDER.rglob("*") if path.suffix == ".yaml" or path.name == "Dockerfile"]
    assert len(files) == 6
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        head = " ".join(
            line.strip("# ") for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")]
        )
        assert re.search(r"\bnot (built|validated|applied)\b", head, re.IGNORECASE), path


def test_the_dockerfile_is_sound() -> None:
    linter = str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_the_build_sends_is_enough_for_the_wheel(tmp_path: Path) -> None:
    """The first stage, on the files that `Dockerfile.dockerignore` lets through."""
    lines = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    context, wheels = tmp_path / "source", tmp_path / "wheel"
    context.mkdir()
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, context / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run(
        [*command, "--wheel-dir", wheels, context], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(wheels.glob("kvoffload-*.whl"))) == 1
