#!/bin/bash
# Expected: in Prometheus' text format a backslash, a quote and a line break in a label's value are written as \\, \" and \n. The format's
#   description says so, and prom-client does it. What a metric was given is what a scrape reads.
# Happens: promjs writes the value as it is. A model in C:\new is read as one in "C:", line break, "ew". A quote or a line break in one
#   value makes the whole scrape invalid, so that all other metrics are lost as well.
# Versions: promjs 0.4.2, prom-client 15.1.3 (npm), Node.js 20, prometheus-client 0.26.0, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install prometheus-client==0.26.0
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts promjs@0.4.2 prom-client@15.1.3
cat >scrape.cjs <<'JAVASCRIPT'
const promClient = require("prom-client");
const prom = require("promjs").default();

const value = JSON.parse(process.argv[2]);
prom.create("counter", "requests_total", "Requests.").inc({ model: value });
const counter = new promClient.Counter({ name: "requests_total", help: "Requests.", labelNames: ["model"] });
counter.inc({ model: value });
promClient.register.metrics().then((text) => console.log(JSON.stringify([prom.metrics(), text])));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


def read(text):
    try:
        (family,) = text_string_to_metric_families(text)
        return family.samples[0].labels["model"]
    except ValueError:
        return None


print("promjs", json.loads(Path("node_modules/promjs/package.json").read_text())["version"])
seen = {}
for value in ("plain", "C:\\new", 'the "best"', "two\nlines"):
    call = subprocess.run(["node", "--no-deprecation", "scrape.cjs", json.dumps(value)], capture_output=True, check=True)
    seen[value], other = map(read, json.loads(call.stdout))
    print(f"{value!r}: read {seen[value]!r}, with prom-client {other!r}")
    assert other == value
is_so = seen == {"plain": "plain", "C:\\new": "C:\new", 'the "best"': None, "two\nlines": None}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
