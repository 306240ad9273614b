#!/bin/bash
# Expected: kubernetes-resource-parser reads the quantities of a Kubernetes manifest: `memoryParser` gives bytes and `cpuParser` CPUs. A
#   quantity may have a fraction, an exponent, or one of the suffixes m, k, M, and Ki, Mi, Gi and the like: "1.5Gi" is 1,610,612,736 bytes.
#   A text that is none is an error.
# Happens: the number is cut at its point or exponent, and its suffix is dropped with the rest: "1.5Gi" of memory is 1 byte, "0.5Gi" is 0
#   and "129e6" is 129. "500m" CPUs are half a CPU, but "100u" is 100 CPUs and "1k" is 1. No error. So a limit of host memory that is
#   compared with what a node has always fits. Kubernetes' own client for Python reads all of them.
# Versions: kubernetes-resource-parser 0.1.0 (npm), kubernetes 37.0.2, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install kubernetes==37.0.2
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts kubernetes-resource-parser@0.1.0
cat >parse.cjs <<'JAVASCRIPT'
const { cpuParser, memoryParser } = require("kubernetes-resource-parser");
const [memory, cpu] = JSON.parse(process.argv[2]);
console.log(JSON.stringify([memory.map(memoryParser), cpu.map(cpuParser)]));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

from kubernetes.utils.quantity import parse_quantity

MEMORY = ["2Gi", "129M", "1.5Gi", "0.5Gi", "129e6"]
CPU = ["2", "500m", "100u", "1k"]
print("kubernetes-resource-parser", json.loads(Path("node_modules/kubernetes-resource-parser/package.json").read_text())["version"])
answer = subprocess.run(["node", "parse.cjs", json.dumps([MEMORY, CPU])], capture_output=True, check=True).stdout
wrong = {}
for name, texts, numbers in zip(("memory", "cpu"), (MEMORY, CPU), json.loads(answer), strict=True):
    for text, number in zip(texts, numbers, strict=True):
        right = float(parse_quantity(text))
        print(f"{name} {text}: {number}, Kubernetes {right:.10g}")
        if number != right:
            wrong[name, text] = number
expected = {("memory", "1.5Gi"): 1, ("memory", "0.5Gi"): 0, ("memory", "129e6"): 129, ("cpu", "100u"): 100, ("cpu", "1k"): 1}
is_so = wrong == expected
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
