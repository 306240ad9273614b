"""`kvoffload dashboards export DIR`: writes this version's dashboards, Prometheus rules and runbook to a folder.

The folder also gets the dashboards and rules as Kubernetes objects.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import kvoffload
from kvoffload.cli.exits import CommandError, Exit, OutputError, say
from kvoffload.cli.partial_file import written
from kvoffload.model.errors import printable

HELP = "write the Grafana dashboards, the Prometheus rules and the runbook into a directory"

_BOARDS, _RULES = "grafana/dashboards", "rules"
_RULE_FILES = ("recording.yml", "alerts.yml")
_NAME = "kvoffload"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["export"], help="export: write the files")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to; made if it does not exist")


def run(args: argparse.Namespace) -> int:
    """Write the exported files to the folder `args.directory`, and print their paths.

    Raises:
        CommandError: a file cannot be written, or this installation has no dashboards.
    """
    source = _source()
    for name, text in files(source):
        target = args.directory / name
        _make(target.parent)
        with written(target) as file:
            file.write(text)
        print(printable(str(target)))
    say(f"Grafana: import the files of {args.directory / 'grafana'}, or provision that folder")
    say(
        f"Prometheus: list both files of {args.directory / 'prometheus'} under rule_files; the dashboards need neither"
    )
    say(f"Kubernetes: kubectl apply -f {args.directory / 'kubernetes'}")
    return Exit.OK


def files(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative path and the content of every exported file.

    Args:
        source: the folder with the dashboards, rules and runbook.
    """
    boards = {path.name: _read(path) for path in sorted((source / _BOARDS).glob("*.json"))}
    rules = {name: _read(source / _RULES / name) for name in _RULE_FILES}
    for name, text in boards.items():
        yield f"grafana/{name}", text
    for name, text in rules.items():
        yield f"prometheus/{name}", text
    yield "RUNBOOK.md", _read(source / "RUNBOOK.md")
    for name, text in boards.items():
        stem = name.removesuffix(".json")
        yield f"kubernetes/{stem}.configmap.yaml", config_map(stem, text)
    for name, text in rules.items():
        stem = name.removesuffix(".yml")
        yield f"kubernetes/{stem}.prometheusrule.yaml", prometheus_rule(f"{_NAME}-{stem}", text)


def config_map(name: str, board: str) -> str:
    """Return a dashboard as a ConfigMap, which the sidecar in Grafana's Helm chart loads.

    `kubectl apply` copies each object into an annotation, whose size is limited to 256 KiB. To stay below the limit,
    each dashboard has a separate ConfigMap, in which the JSON is on one line.
    """
    head = _object("v1", "ConfigMap", f"{_NAME}-{name}", '    grafana_dashboard: "1"\n')
    return (
        f"{head}data:\n  {_NAME}-{name}.json: |\n    {json.dumps(json.loads(board), separators=(',', ':'))}\n"
    )


def prometheus_rule(name: str, rules: str) -> str:
    """Return the content of a rules file as a PrometheusRule object for the Prometheus operator."""
    head = _object("monitoring.coreos.com/v1", "PrometheusRule", name)
    return f"{head}spec:\n{textwrap.indent(rules, '  ')}"


def _object(version: str, kind: str, name: str, labels: str = "") -> str:
    about = f"# kvoffload {kvoffload.__version__}. Add the namespace, and the labels that your operator selects by.\n"
    label = f"    app.kubernetes.io/name: {_NAME}\n{labels}"
    return f"{about}apiVersion: {version}\nkind: {kind}\nmetadata:\n  name: {name}\n  labels:\n{label}"


def _source() -> Path:
    """Return the dashboards folder of the installed package, or of the checkout in an editable installation."""
    package = Path(kvoffload.__file__).parent
    for folder in (package / "dashboards", package.parent / "dashboards"):
        if (folder / _BOARDS).is_dir():
            return folder
    raise CommandError("this installation has no dashboards: install kvoffload again")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(folder, error) from error


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
