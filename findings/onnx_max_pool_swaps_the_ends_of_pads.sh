#!/bin/bash
# Expected: the `pads` of ONNX's MaxPool hold the beginnings of all axes and then their ends. So pads [0, 0, 1, 1] add a row and a
#   column at the end, and a 2 x 2 window makes 5 x 5 numbers of 5 x 5. onnx's shape inference says so too.
# Happens: onnx's ReferenceEvaluator makes 4 x 6 numbers, as if both pads were for the columns. The rows' end is lost. AveragePool
#   with the same attributes has the right shape, and so has MaxPool with a dilation of 2.
# Versions: onnx 1.23.2, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install onnx==1.23.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, shape_inference
from onnx.reference import ReferenceEvaluator

IMAGE = np.arange(1, 26, dtype=np.float32).reshape(1, 1, 5, 5)


def pooled(kind, **attributes):
    """Return the inferred shape and the result."""
    node = helper.make_node(kind, ["x"], ["y"], kernel_shape=[2, 2], pads=[0, 0, 1, 1], **attributes)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, IMAGE.shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([node], "pool", [x], [y]), opset_imports=[helper.make_opsetid("", 22)])
    shape = shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape
    return tuple(axis.dim_value for axis in shape.dim), ReferenceEvaluator(model).run(None, {"x": IMAGE})[0]


print("onnx", onnx.__version__)
seen = {}
for name, kind, attributes in (
    ("AveragePool", "AveragePool", {}),
    ("MaxPool, dilation 2", "MaxPool", {"dilations": [2, 2]}),
    ("MaxPool", "MaxPool", {}),
):
    inferred, result = pooled(kind, **attributes)
    seen[name] = inferred[2:], result.shape[2:]
    print(f"{name}: inferred shape {inferred[2:]}, evaluated {result.shape[2:]}")
print("result of MaxPool:", *result[0, 0].astype(int), sep="\n  ")
is_so = list(seen.values()) == [((5, 5), (5, 5)), ((4, 4), (4, 4)), ((5, 5), (4, 6))]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
