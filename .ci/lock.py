"""Writes requirements.lock: every package that development needs, with its version.

The input is pyproject.toml: the package's requirements, its build requirements, and the groups "dev" and "docs". pip
resolves them in a dry run, which installs nothing. The lock begins with a digest of the input. `--check` compares this
digest with the current input, and so finds a stale lock without a package index. Local versions ("+cpu") are left out,
because each machine needs a different build of torch.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / ".ci" / "requirements.lock"
HEADER = "# Written by `make lock` from pyproject.toml; do not edit.\n# input: {digest}\n"


def requirements(pyproject: dict[str, Any]) -> list[str]:
    """Return everything that development requires, sorted."""
    groups = (
        pyproject["build-system"]["requires"],
        pyproject["project"]["dependencies"],
        *pyproject["dependency-groups"].values(),
    )
    return sorted({line for group in groups for line in group})


def digest(wanted: list[str]) -> str:
    return hashlib.sha256("\n".join(wanted).encode()).hexdigest()


def is_current(wanted: list[str], lock: str) -> bool:
    return lock.startswith(HEADER.format(digest=digest(wanted)))


def resolve(wanted: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    answer = subprocess.run([*command, "--report", "-", *wanted], check=True, stdout=subprocess.PIPE)
    found = [item["metadata"] for item in json.loads(answer.stdout)["install"]]
    return sorted(
        f"{item['name'].lower().replace('_', '-')}=={item['version'].split('+')[0]}" for item in found
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="write .ci/requirements.lock, or say whether it is stale")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the lock is stale")
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    if not parser.parse_args().check:
        LOCK.write_text(HEADER.format(digest=digest(wanted)) + "\n".join(resolve(wanted)) + "\n")
        return 0
    if LOCK.exists() and is_current(wanted, LOCK.read_text()):
        return 0
    print("requirements.lock is stale: pyproject.toml's requirements have changed. Run `make lock`.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
