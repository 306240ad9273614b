#!/bin/bash
# Expected: a setting of LMCache means the same in its YAML file and in its environment variable, which overrides the file.
#   A value of the environment that is no boolean is named in a warning, as one that is no number is.
# Happens: `yes` and `on` switch a feature on in the file (they are YAML's booleans), and off in the environment, without a
#   warning: only "true" and "1" mean on there. LMCACHE_LOCAL_CPU=yes switches off what is on by default and in the file.
# Versions: lmcache 0.5.6 without most of its dependencies (its configuration needs pyyaml and requests only), Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pyyaml==6.0.4 requests==2.34.2
"$folder/venv/bin/pip" --quiet install --no-deps lmcache==0.5.6
cd "$folder"
LMCACHE_TRACK_USAGE=false LMCACHE_DISABLE_BANNER=1 venv/bin/python - 2>log <<'PYTHON'
import os
import sys
from importlib.metadata import version
from pathlib import Path

from lmcache.v1.config import load_engine_config_with_overrides


def local_cpu(in_file, in_environment=None):
    """Return whether LMCache would use the host's memory, with these settings."""
    Path("config.yaml").write_text(f"local_cpu: {in_file}\n")
    os.environ.pop("LMCACHE_LOCAL_CPU", None)
    if in_environment is not None:
        os.environ["LMCACHE_LOCAL_CPU"] = in_environment
    return load_engine_config_with_overrides(config_file_path="config.yaml").local_cpu


print("lmcache", version("lmcache"))
words = ("true", "yes", "on")
in_file = [local_cpu(word) for word in words]
in_environment = [local_cpu("yes", word) for word in words]
for word, there, here in zip(words, in_file, in_environment):
    print(f"{word}: {there} in the file, {here} in the environment over a file that says yes")
has_warned = any("yes" in line and "WARNING" in line for line in Path("log").read_text().splitlines())
print("a warning names the word:", has_warned)
is_so = in_file == [True, True, True] and in_environment == [True, False, False] and not has_warned
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
