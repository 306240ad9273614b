#!/bin/bash
# Expected: ONNX's Cast to a float8 with `saturate=0` makes a number that is too large NaN (E4M3FN) or infinity (E5M2). The operator's table
#   says so of all numbers that are above the greatest one after rounding, 448 or 57344, and onnx's ReferenceEvaluator does it.
# Happens: onnxruntime makes 470 NaN, 490 the greatest number, 448, and 500 NaN again. With E5M2, 60000 is 57344, 62000 is NaN, and 70000 is
#   infinity. The range that is treated otherwise would have the bits after the greatest number: from 480 to 496, and from 61440
#   to 65536.
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

NUMBERS = {"FLOAT8E4M3FN": [460, 470, 490, 500, np.inf], "FLOAT8E5M2": [60000, 62000, 65000, 70000, np.inf]}


def cast(name, numbers):
    """Return the numbers after a cast to the type and back, by onnxruntime and by onnx."""
    nodes = [
        helper.make_node("Cast", ["x"], ["small"], to=getattr(TensorProto, name), saturate=0),
        helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [None]) for end in "xy"]
    graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    inputs = {"x": np.array(numbers, np.float32)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0].tolist(), ReferenceEvaluator(model).run(None, inputs)[0].tolist()


print("onnxruntime", onnxruntime.__version__, "onnx", onnx.__version__)
seen = {}
for name, numbers in NUMBERS.items():
    seen[name] = cast(name, numbers)
    for who, results in zip(("onnxruntime", "onnx's reference"), seen[name]):
        print(f"{name}, {who}:", ", ".join(f"{number} is {result}" for number, result in zip(numbers, results)))
is_so = str(seen) == str(
    {
        "FLOAT8E4M3FN": ([448.0, np.nan, 448.0, np.nan, np.nan], [448.0, np.nan, np.nan, np.nan, np.nan]),
        "FLOAT8E5M2": ([57344.0, np.nan, np.nan, np.inf, np.inf], [57344.0, np.inf, np.inf, np.inf, np.inf]),
    }
)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
