"""Checks the deployment files without a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from packaging import tags

from tests.deploy.kustomize import build, load
from tests.tooling.scripts import ROOT

FOLDER = ROOT / "plugins" / "kvoffload_vllm" / "deploy"


KUBERNETES = tuple(f"kubernetes/{tier}" for tier in ("base", "host-memory", "disk", "s3", "mooncake"))
PODS = (*KUBERNETES, "llm-d/patch-vllm.yaml")
CHART = "production-stack.yaml"
"""Objects that Helm rendered."""
ALL = (*PODS, CHART)


def objects(name: str) -> list[dict[str, Any]]:
    if name == CHART:
        return load(Path(__file__).parent / name)
    return build(FOLDER / name) if (FOLDER / name).is_dir() else load(FOLDER / name)


def only(name: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in objects(name) if one["kind"] == kind]
    return found


def pod(name: str) -> dict[str, Any]:
    server = only(name, "StatefulSet" if name in KUBERNETES else "Deployment")
    spec: dict[str, Any] = server["spec"]["template"]["spec"]
    return spec


def containers(name: str) -> list[dict[str, Any]]:
    """Return the containers of the doctor and the server, with arguments from the ConfigMap filled in."""
    found = [*pod(name)["initContainers"], *pod(name)["containers"]]
    if name not in KUBERNETES:
        return found
    text = only(name, "ConfigMap")["data"]["kv-transfer-config"]
    for container in found:
        container["args"] = [
            argument.replace("$(KV_TRANSFER_CONFIG)", text) for argument in container["args"]
        ]
    return found


def words(container: dict[str, Any]) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def transfer_config(container: dict[str, Any]) -> dict[str, Any]:
    text = "\n".join(words(container))
    (found,) = re.findall(r"--kv-transfer-config[=\n](\{.*\})", text, flags=re.DOTALL)
    config: dict[str, Any] = json.loads(found)
    return config


def settings(name: str) -> dict[str, Any]:
    found: dict[str, Any] = transfer_config(containers(name)[1])["kv_connector_extra_config"]
    return found


def validate(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ALL)
def test_every_object_and_its_pod_is_valid(name: str) -> None:
    for one in objects(name) if name != "llm-d/patch-vllm.yaml" else ():
        validate(one)
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod(name)})


def test_a_field_that_does_not_exist_is_an_error() -> None:
    spec = {**pod(PODS[0]), "swap": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec})


@pytest.mark.parametrize("name", KUBERNETES)
def test_every_object_that_a_pod_refers_to_is_defined(name: str) -> None:
    """Check that the folder defines every volume, account, service and image that a pod refers to."""
    found, spec, chosen = objects(name), pod(name), settings(name)
    names = {(one["kind"], one["metadata"]["name"]) for one in found}
    claims = {one["metadata"]["name"] for one in only(name, "StatefulSet")["spec"]["volumeClaimTemplates"]}
    volumes = claims | {one["name"] for one in spec["volumes"]}
    for container in [*spec["initContainers"], *spec["containers"]]:
        mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", ())}
        assert set(mounts.values()) <= volumes
        for key in {"disk_path", "host_path"} & chosen.keys():
            assert any(chosen[key].startswith(f"{path}/") for path in mounts)
        assert container["image"] == "registry.example.com/vllm-kvoffload:0.1.0"
    if account := spec.get("serviceAccountName"):
        assert ("ServiceAccount", account) in names
    if str(chosen.get("remote_url", "")).startswith("mooncake://"):
        master = urlsplit(chosen["remote_url"])
        assert ("Service", master.hostname) in names
        (node,) = [one for one in found if one["metadata"]["name"] == "mooncake-node"]
        (container,) = node["spec"]["template"]["spec"]["containers"]
        assert f"--master_server_address={master.netloc}" in container["args"]


@pytest.mark.parametrize("name", PODS)
def test_the_pod_is_guaranteed_and_confined(name: str) -> None:
    for container in containers(name):
        resources, security = container["resources"], container["securityContext"]
        assert resources["requests"] == resources["limits"]
        assert float(resources["limits"]["cpu"]).is_integer()
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_only_servers_and_the_store_can_connect_to_mooncake() -> None:
    """Check that a policy selects every pod that uses Mooncake. Other pods may connect only to a server's
    HTTP port.
    """
    policies = {
        one["metadata"]["name"]: one
        for one in objects("kubernetes/mooncake")
        if one["kind"] == "NetworkPolicy"
    }
    friends = [{"podSelector": {"matchLabels": {"app": app}}} for app in ("mooncake", "vllm")]
    assert policies["mooncake"]["spec"]["ingress"] == [{"from": friends}]
    assert policies["vllm"]["spec"]["ingress"] == [
        {"ports": [{"port": "http", "protocol": "TCP"}]},
        {"from": friends},
    ]


@pytest.mark.parametrize("name", ALL)
def test_the_doctor_gets_the_servers_settings_image_and_limits(name: str) -> None:
    doctor, server = containers(name)
    assert transfer_config(doctor) == transfer_config(server)
    assert doctor["image"] == server["image"]
    assert quantities(doctor["resources"]) == quantities(server["resources"])


def quantities(resources: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the resources with numbers as text, which Kubernetes reads alike."""
    return {kind: {name: str(one) for name, one in found.items()} for kind, found in resources.items()}


@pytest.mark.parametrize("name", ALL)
def test_the_doctor_finds_no_problem_in_the_settings(name: str) -> None:
    """The doctor may warn, because a pod's tiers are not on this machine. It must find nothing that stops the
    server.
    """
    doctor, _ = containers(name)
    command = [sys.executable, "-m", "kvoffload", *doctor["command"][1:], *doctor["args"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    said = {one["check"]: one["verdict"] for one in json.loads(done.stdout)["findings"]}
    wanted = ("settings", "vllm connector", "load failures", "host pool", "model sizes")
    assert {check: said[check] for check in wanted} == dict.fromkeys(wanted, "ok")
    assert {check for check, verdict in said.items() if verdict == "unknown"} <= {"vllm version"}


@pytest.mark.parametrize("kind", ["LLMInferenceService", "InferenceService"])
def test_the_doctor_reads_the_settings_and_the_ranks_of_kserves_objects(kind: str) -> None:
    (service,) = [one for one in load(Path(__file__).with_name("kserve.yaml")) if one["kind"] == kind]
    command = [sys.executable, "-m", "kvoffload", "doctor", "--json", "--block-bytes=2304KiB"]
    command += ["--device-blocks=2", "--", json.dumps(service)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    wanted = ("settings", "vllm connector", "load failures", "host pool")
    assert {check: found[check]["verdict"] for check in wanted} == dict.fromkeys(wanted, "ok")
    half = (32 << 20) // (2304 << 10)  # each of two ranks has half of host_bytes
    assert f"{half} blocks on the host" in found["host pool"]["finding"]


@pytest.mark.parametrize("name", ["kubernetes/base/server.yaml", "llm-d/patch-vllm.yaml"])
def test_the_memory_limit_is_the_documented_sum(name: str) -> None:
    """Check the sum that a comment at the top of the file explains: host memory, weights, processes, shared
    memory.
    """
    text = (FOLDER / name).read_text(encoding="utf-8")
    (terms,) = re.findall(
        r"^# +(\d+)Gi host_bytes \+ (\d+)Gi .* \+ (\d+)Gi .* \+ (\d+)Gi /dev/shm = (\d+)Gi$", text, re.M
    )
    host, weights, processes, shared, total = (int(one) for one in terms)
    for folder in [one for one in PODS if one.partition("/")[0] == name.partition("/")[0]]:
        assert settings(folder)["host_bytes"] == f"{host}GiB"
        volumes = {volume["name"]: volume["emptyDir"] for volume in pod(folder)["volumes"]}
        assert volumes["shm"]["sizeLimit"] == f"{shared}Gi"
        assert host + weights + processes + shared == total
        assert containers(folder)[1]["resources"]["limits"]["memory"] == f"{total}Gi"


def test_the_memory_volume_has_room_for_host_memory_and_its_table() -> None:
    name = "kubernetes/host-memory"
    (volume,) = [one["emptyDir"] for one in pod(name)["volumes"] if one["name"] == "host-memory"]
    host = int(settings(name)["host_bytes"].removesuffix("GiB"))
    assert volume["medium"] == "Memory"
    assert host < int(volume["sizeLimit"].removesuffix("Gi")) <= 1.02 * host


@pytest.mark.parametrize("name", ALL)
def test_a_pod_is_killed_only_after_the_server_had_time_to_shut_down(name: str) -> None:
    (shutdown,) = re.findall(r"--shutdown-timeout=(\d+)", "\n".join(words(containers(name)[1])))
    period = pod(name).get("terminationGracePeriodSeconds", 30)  # Kubernetes' default, which the chart leaves
    assert period >= int(shutdown) + 10


def test_the_charts_pod_has_what_the_values_say_and_the_manifests_settings() -> None:
    """Fail if the chart ignored a value, or if the values have changed since Helm rendered them."""
    (values,) = load(FOLDER / "production-stack-values.yaml")
    (model,) = values["servingEngineSpec"]["modelSpec"]
    (doctor, server), (_, plain) = containers(CHART), containers("kubernetes/base")
    assert {name: doctor[name] for name in model["initContainer"]} == model["initContainer"]
    assert server["image"] == f"{model['repository']}:{model['tag']}"
    assert (
        values["servingEngineSpec"]["containerSecurityContext"].items() <= server["securityContext"].items()
    )
    assert server["command"][-len(model["vllmConfig"]["extraArgs"]) :] == model["vllmConfig"]["extraArgs"]
    assert only(CHART, "Deployment")["spec"]["strategy"] == values["servingEngineSpec"]["strategy"]
    assert only(CHART, "PersistentVolumeClaim")["spec"]["resources"]["requests"] == {
        "storage": model["pvcStorage"]
    }
    # The chart passes `--no-enable-prefix-caching` and mounts no shared memory unless the values have a key for each.
    assert "--enable-prefix-caching" in server["command"]
    (shared,) = [one["emptyDir"] for one in pod(CHART)["volumes"] if one["name"] == "shm"]
    assert shared["sizeLimit"] == pod("kubernetes/base")["volumes"][0]["emptyDir"]["sizeLimit"]
    assert transfer_config(server) == transfer_config(plain)
    # The pod is Guaranteed, with the manifests' memory.
    assert server["resources"]["requests"] == server["resources"]["limits"]
    assert server["resources"]["limits"]["memory"] == plain["resources"]["limits"]["memory"]


def test_hadolint_accepts_the_dockerfile() -> None:
    linter = str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def make_wheel(path: Path) -> Path:
    """Make an empty wheel with the metadata that pip needs."""
    info = "kvoffload-0.1.0.dist-info"
    extras = "".join(f"Provides-Extra: {name}\n" for name in ("otel", "s3", "mooncake", "report"))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: kvoffload\nVersion: 0.1.0\n{extras}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_the_image_installs_the_wheel_that_was_built_and_none_of_an_index(tmp_path: Path) -> None:
    """Offer pip a wheel of the same version for this platform, which pip prefers if it may choose."""
    (index := tmp_path / "index" / "kvoffload").mkdir(parents=True)
    (built := tmp_path / "wheel").mkdir()
    platform = next(iter(tags.sys_tags()))
    other = make_wheel(index / f"kvoffload-0.1.0-{platform}.whl")
    (index / "index.html").write_text(f'<a href="{other.name}">{other.name}</a>')
    wheel = make_wheel(built / "kvoffload-0.1.0-py3-none-any.whl")
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"source=/wheel,target=/wheel\s+(.*?)\s+&& kvoffload --version", text)
    options = f"--index-url {index.parent.as_uri()} --dry-run --ignore-installed --quiet --report -"
    shell = command.replace("/wheel/", f"{built}/").replace(
        "python3 -m pip install", f"{sys.executable} -m pip install {options}"
    )
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["install"]
    assert found["download_info"]["url"] == wheel.as_uri()


@pytest.mark.slow
def test_the_build_context_is_enough_to_build_the_wheel(tmp_path: Path) -> None:
    """Build the wheel from only the files that `Dockerfile.dockerignore` includes."""
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
