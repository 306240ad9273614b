#!/bin/bash
# Expected: with `qk_matmul_output_mode` 0, ONNX's Attention returns the plain product of queries and keys as its fourth output, and with
#   mode 1 the product after the softcap. That is how the operator's schema describes the modes.
# Happens: onnx's ReferenceEvaluator, which other runtimes are compared with, returns softcapped scores in both modes. Scores of 8 and 2
#   are 1.9993 and 1.5232 with a softcap of 2. Without a softcap, mode 0 is right.
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
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def scores(mode, **attributes):
    """Return the fourth output for one query and two keys, whose products are 8 and 2."""
    node = helper.make_node("Attention", list("qkv"), ["y", "", "", "scores"], scale=1.0, qk_matmul_output_mode=mode, **attributes)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, None, 1]) for name in "qkv"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in ("y", "scores")]
    model = helper.make_model(helper.make_graph([node], "attention", inputs, outputs), opset_imports=[helper.make_opsetid("", 24)])
    onnx.checker.check_model(model, full_check=True)
    query, keys = np.float32([[[[2]]]]), np.float32([[[[4], [1]]]])
    return ReferenceEvaluator(model).run(["scores"], {"q": query, "k": keys, "v": keys})[0].ravel()


print("onnx", onnx.__version__)
plain, raw, capped = scores(0), scores(0, softcap=2.0), scores(1, softcap=2.0)
print("mode 0, no softcap:  ", plain)
print("mode 0, softcap of 2:", raw)
print("mode 1, softcap of 2:", capped)
is_so = plain.tolist() == [8, 2] and np.allclose(capped, 2 * np.tanh([4, 1])) and np.array_equal(raw, capped)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
