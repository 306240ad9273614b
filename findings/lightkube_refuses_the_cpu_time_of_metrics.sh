#!/bin/bash
# Expected: lightkube's `parse_quantity` reads "an str representing a K8s quantity", and its documentation refers to Kubernetes' definition,
#   which has exponents: `1E3`. Kubernetes' metrics API gives the CPU time of pods and nodes in billionths: `11122600n`.
# Happens: both are a ValueError ("Invalid unit suffix"), and so is `u`, a millionth. `1e3` is read. Kubernetes' own client for Python reads
#   all of them. That the definition does not name `n` and `u`, which Kubernetes itself writes, is
#   known: kubernetes/kubernetes pull request 110468.
# Versions: lightkube 1.0.1, lightkube-models 1.37.0.8, kubernetes 37.0.2, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install lightkube==1.0.1 lightkube-models==1.37.0.8 kubernetes==37.0.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import kubernetes.utils.quantity
import lightkube.utils.quantity


def parsed(module, text):
    try:
        return float(module.parse_quantity(text))
    except ValueError as error:
        return str(error)


print("lightkube", version("lightkube"), "kubernetes", version("kubernetes"))
seen = {}
for text in ("1e3", "1E3", "250m", "250u", "11122600n"):
    seen[text] = parsed(lightkube.utils.quantity, text), parsed(kubernetes.utils.quantity, text)
    print(f"{text}: lightkube {seen[text][0]}, kubernetes {seen[text][1]}")
is_so = seen == {
    "1e3": (1000, 1000),
    "1E3": ("Invalid unit suffix: E3", 1000),
    "250m": (0.25, 0.25),
    "250u": ("Invalid unit suffix: u", 0.00025),
    "11122600n": ("Invalid unit suffix: n", 0.0111226),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
