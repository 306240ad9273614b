"""Renders the overlays with a real kubectl, which `make kubectl` installs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomize import build
from tests.deploy.test_deploy import FOLDER, KUBERNETES, validate
from tests.tooling.scripts import ROOT

KUBECTL = ROOT / ".venv" / "kubectl" / "kubectl"
OURS = "registry.example.com/vllm-kvoffload:0.1.0"

# A stand-in for the guide's base, with what the patch has to replace or keep: a placeholder for the image, a delay before the signal, a
# short grace period, other memory, and volumes.
GUIDE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: decode}
spec:
  selector: {matchLabels: {app: decode}}
  template:
    metadata: {labels: {app: decode}}
    spec:
      terminationGracePeriodSeconds: 20
      containers:
        - name: modelserver
          image: REPLACE_MODEL_SERVER_IMAGE
          command: [vllm, serve]
          args: []
          env: [{name: HF_HOME, value: /models}]
          lifecycle: {preStop: {exec: {command: [/bin/sleep, "15"]}}}
          resources: {requests: {memory: 200Gi}, limits: {memory: 400Gi}}
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes:
        - {name: models, emptyDir: {}}
        - {name: shm, emptyDir: {medium: Memory}}
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not KUBECTL.exists(), reason="needs kubectl: make kubectl"),
]


def render(folder: Path) -> list[dict[str, Any]]:
    environment = {"PATH": os.defpath, "HOME": "/nowhere"}  # no cluster of this machine
    command = [str(KUBECTL), "kustomize", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def by_name(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{one['kind']} {one['metadata']['name']}": one for one in objects}


@pytest.mark.parametrize("name", KUBERNETES)
def test_a_real_kubectl_renders_valid_objects_and_the_same_as_our_merge(name: str) -> None:
    found = render(FOLDER / name)
    for one in found:
        validate(one)
    assert by_name(found) == by_name(build(FOLDER / name))


@pytest.mark.parametrize("name", KUBERNETES)
def test_the_registry_is_named_in_one_place(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "kubernetes", tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / "image" / "kustomization.yaml"
    file.write_text(file.read_text().replace("registry.example.com", "registry.of.mine"))
    text = yaml.safe_dump(render(tmp_path / name))
    assert "registry.example.com" not in text
    assert "registry.of.mine/vllm-kvoffload:0.1.0" in text


def test_llm_ds_patch_gives_a_valid_deployment_with_our_image_memory_and_time_to_end(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "deployment.yaml").write_text(GUIDE)
    (base / "kustomization.yaml").write_text("resources: [deployment.yaml]\n")
    ours = tmp_path / "native" / "cpu" / "kvoffload"
    shutil.copytree(FOLDER / "llm-d", ours)
    (found,) = render(ours)
    validate(found)
    spec = found["spec"]["template"]["spec"]
    (doctor,), (server,) = spec["initContainers"], spec["containers"]
    assert (doctor["image"], server["image"]) == (OURS, OURS)
    assert any("KVOffloadConnector" in argument for argument in server["args"])
    assert server["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert {one["name"]: one["emptyDir"] for one in spec["volumes"]} == {
        "models": {},
        "shm": {"medium": "Memory", "sizeLimit": "16Gi"},
    }
    assert server["resources"]["requests"] == server["resources"]["limits"]
    assert server["env"] == [{"name": "HF_HOME", "value": "/models"}]
    delay = int(server["lifecycle"]["preStop"]["exec"]["command"][-1])
    (shutdown,) = re.findall(r"--shutdown-timeout=(\d+)", "\n".join(server["args"]))
    assert spec["terminationGracePeriodSeconds"] >= delay + int(shutdown) + 15


@pytest.mark.parametrize("name", KUBERNETES)
def test_the_doctor_reads_what_kubectl_renders(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "kvoffload",
        "doctor",
        "--json",
        "--",
        yaml.safe_dump_all(render(FOLDER / name)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = {one["check"]: one["verdict"] for one in json.loads(done.stdout)["findings"]}
    assert {said[check] for check in ("settings", "vllm connector", "load failures")} == {"ok"}
