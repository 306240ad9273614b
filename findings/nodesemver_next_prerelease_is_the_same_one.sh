#!/bin/bash
# Expected: node-semver for Python is a port of npm's semver. `inc(version, "prerelease")` gives the next prerelease, which is greater than
#   the version, as npm's does: 1.2.3-alpha.0 follows on 1.2.3-alpha, and 1.2.3-alpha.2 on 1.2.3-alpha.1.
# Happens: a prerelease whose parts have no number stays as it is: the one that follows on 1.2.3-alpha is 1.2.3-alpha, without an error. A
#   script that tags releases makes the same tag again. With a number among the parts it is counted up, as in npm.
# Versions: node-semver 0.9.1 (Python), Python 3.11, semver 7.8.6 (npm). Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install node-semver==0.9.1
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts semver@7.8.6
cat >next.cjs <<'JAVASCRIPT'
const semver = require("semver");
console.log(JSON.stringify(JSON.parse(process.argv[2]).map((version) => semver.inc(version, "prerelease"))));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version

import nodesemver

VERSIONS = ["1.2.3", "1.2.3-alpha.1", "1.2.3-0", "1.2.3-alpha.1.x", "1.2.3-alpha", "0.1.0-rc", "1.2.3-alpha.beta"]
print("node-semver", version("node-semver"))
npm = json.loads(subprocess.run(["node", "next.cjs", json.dumps(VERSIONS)], capture_output=True, check=True).stdout)
same = []
for each, right in zip(VERSIONS, npm, strict=True):
    following = str(nodesemver.inc(each, "prerelease", loose=False))
    print(f"the prerelease after {each}: npm {right}, Python {following}")
    if following == each:
        same.append(each)
    else:
        assert following == right
is_so = same == VERSIONS[4:] and all(nodesemver.gt(right, each, loose=False) for each, right in zip(VERSIONS, npm, strict=True))
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
