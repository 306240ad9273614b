"""Finds containers in the texts that start them: compose files, pods, objects of operators with pods in them, and Dockerfiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvoffload.checks.script import read_documents, split_script, text_of

_KEYS = (("entrypoint", "command"), ("command", "args"))
"""The keys that name a container's command and its arguments: those of compose and those of a pod."""
_YAML_LIKE = re.compile(r"\s*(?:(?:#|---)[^\n]*\n\s*)*(?:\[|\{|- |[\w.-]+:(?:\s|$))")
_DOCKERFILE_LIKE = re.compile(r"\s*(?:(?:#|ARG\b)[^\n]*\n\s*)*FROM[ \t]", re.IGNORECASE)
_COMMENT = re.compile(r"^[ \t]*#.*\n", re.MULTILINE)
_CONTINUED = re.compile(r"\\[ \t\r]*\n")
_INSTRUCTION = re.compile(r"^[ \t]*(FROM|ENV|ENTRYPOINT|CMD)[ \t]+(.*)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Container:
    """What a text says about a container.

    Args:
        command: the command; empty if the image's own command runs.
        arguments: the arguments of that command.
        environ: the environment variables with a value in the text.
        image: the image; empty if the text does not name it.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    image: str = ""


def read_containers(text: str) -> list[Container]:
    """Return the containers of a text, which has none if it is neither YAML, JSON nor a Dockerfile.

    Raises:
        ConfigError: the text is YAML and PyYAML is not installed, or a quote in an argument is not closed.
    """
    if _DOCKERFILE_LIKE.match(text):
        return [_of_dockerfile(text)]
    if not _YAML_LIKE.match(text):
        return []
    documents = read_documents(text)
    maps = dict(_config_maps(documents))
    return [*_of_kserve(documents, maps)] or [_of_mapping(one, maps) for one in _mappings(documents)]


def _of_kserve(documents: list[Any], maps: Mapping[str, object]) -> Iterator[Container]:
    """Yield the vLLMs that KServe's own script starts for LLMInferenceServices: those without a command in the text."""
    for one in documents:
        spec = _at(one, "spec")
        if _at(one, "kind") != "LLMInferenceService":
            continue
        for workload in (spec, _at(spec, "prefill")):
            containers = _at(workload, "template", "containers")
            for main in containers if isinstance(containers, list) else ():
                if isinstance(main, dict) and main.get("name") == "main" and not main.get("command"):
                    unread = [f"$(spec.{key})" for key in ("baseRefs", "runtime") if _at(spec, key)]
                    yield _with_script(_of_mapping(main, maps), workload, unread)


def _with_script(main: Container, workload: object, unread: list[str]) -> Container:
    """Return a container with the arguments that KServe's script puts before those in the text.

    Placeholders stand for the arguments that KServe makes of `unread`, of other parallelism and of several nodes.
    """
    parallelism = _at(workload, "parallelism")
    ranks = parallelism if isinstance(parallelism, dict) else {}
    words = ["--tensor-parallel-size", text_of(ranks["tensor"])] if ranks.get("tensor") else []
    words += split_script(main.environ.get("VLLM_ADDITIONAL_ARGS", ""))
    several_nodes = ["$(worker)"] if _at(workload, "worker") else []
    unread = [*unread, *(f"$(parallelism.{key})" for key in ranks if key != "tensor"), *several_nodes]
    return replace(main, arguments=("/mnt/models", *words, *main.arguments, *unread))


def _at(value: object, *keys: str) -> object:
    """Return the value at the end of a path through mappings; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _config_maps(documents: list[Any]) -> Iterator[tuple[str, object]]:
    """Yield the name and the data of each ConfigMap."""
    for one in documents:
        if _at(one, "kind") == "ConfigMap":
            yield text_of(_at(one, "metadata", "name")), _at(one, "data")


def _mappings(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the mappings in documents that have the keys of a container."""
    left: list[object] = [documents]
    seen: set[int] = set()  # YAML's anchors can repeat a value many times, and put a value into itself
    while left:
        value = left.pop()
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict) and {"entrypoint", "command", "args"} & value.keys():
            yield value
        else:
            left += reversed(value if isinstance(value, list) else [*value.values()])


def _of_mapping(found: Mapping[str, Any], maps: Mapping[str, object]) -> Container:
    command, arguments = _KEYS["args" in found]
    return Container(
        _words(found.get(command)),
        _words(found.get(arguments)),
        _variables(found.get("environment") or found.get("env"), maps),
        text_of(found.get("image") or ""),
    )


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(text_of, value))
    return () if value is None else tuple(split_script(text_of(value)))


def _variables(value: object, maps: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of compose's mapping or list, or of a pod's list, if the text has their values."""
    if isinstance(value, dict):
        return {str(name): text_of(one) for name, one in value.items() if one is not None}
    found: dict[str, str] = {}
    for one in value if isinstance(value, list) else ():
        if isinstance(one, str) and "=" in one:
            name, _, text = one.partition("=")
            found[name] = text
        elif isinstance(one, dict) and (known := _value(one, maps)) is not None:
            found[text_of(one.get("name"))] = text_of(known)
    return found


def _value(variable: dict[str, Any], maps: Mapping[str, object]) -> object:
    """Return the value of a pod's variable, which may be in a ConfigMap; None if the text does not have it."""
    reference = _at(variable, "valueFrom", "configMapKeyRef")
    if not isinstance(reference, dict):
        return variable.get("value")
    return _at(maps.get(text_of(reference.get("name"))), text_of(reference.get("key")))


def _of_dockerfile(text: str) -> Container:
    """Return the container of a Dockerfile's last stage, in which the last command and the last arguments count.

    A stage begins with what the stage has that it names.
    """
    parts: dict[str, tuple[str, ...]] = {}
    environ: dict[str, str] = {}
    inherited: tuple[str, ...] | None = None
    stages: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, str]]] = {}
    for word, value in _INSTRUCTION.findall(_CONTINUED.sub(" ", _COMMENT.sub("", text))):
        name = word.upper()
        if name == "FROM":
            image, *alias = [one for one in value.split() if not one.startswith("--")] or [""]
            before = stages.get(image.lower(), ({"FROM": (image,)}, {}))
            parts = {**before[0]}
            environ = {**before[1]}
            inherited = parts.get("CMD")
            stages |= {one.lower(): (parts, environ) for one in alias[1:]}
        elif name == "ENV":
            environ |= _variables_of_instruction(value)
        else:
            parts[name] = tuple(split_script(value))
            if name == "ENTRYPOINT" and parts.get("CMD") is inherited:
                parts.pop("CMD", None)  # Docker drops the arguments of another command
    return Container(parts.get("ENTRYPOINT", ()), parts.get("CMD", ()), environ, *parts["FROM"])


def _variables_of_instruction(value: str) -> dict[str, str]:
    name, space, old_form = value.replace("\t", " ").partition(" ")
    if "=" not in name:
        return {name: old_form.strip()} if space else {}
    return _variables(split_script(value), {})
