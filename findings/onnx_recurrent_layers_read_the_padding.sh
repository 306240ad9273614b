#!/bin/bash
# Expected: `sequence_lens` of ONNX's RNN, GRU and LSTM gives each sequence's length in a padded batch. The last state of a sequence with
#   two steps of four is its state after two, and the reverse direction begins at its second step.
# Happens: onnx's ReferenceEvaluator takes the input without a warning and does not use it. The padding is read as data, so that
#   the last state depends on what the padding holds.
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

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def last_state(kind, direction, steps):
    """Return the state at the end of one sequence, whose length is given as 2."""
    node = helper.make_node(kind, ["x", "w", "r", "", "lengths"], ["", "state"], hidden_size=1, direction=direction)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xwr"]
    inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, [1]))
    state = helper.make_tensor_value_info("state", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([node], "layer", inputs, [state]), opset_imports=[helper.make_opsetid("", 22)])
    weights = np.full((1, GATES[kind], 1), 0.5, np.float32)
    x = np.array(steps, np.float32).reshape(-1, 1, 1)
    return ReferenceEvaluator(model).run(None, {"x": x, "w": weights, "r": weights, "lengths": np.array([2], np.int32)})[0].item()


print("onnx", onnx.__version__)
is_so = True
for kind in GATES:
    for direction in ("forward", "reverse"):
        alone, zeros, others = (last_state(kind, direction, steps) for steps in ([1, 2], [1, 2, 0, 0], [1, 2, 9, 9]))
        print(f"{kind} {direction}: {alone:.4f} without padding, {zeros:.4f} with zeros behind, {others:.4f} with nines behind")
        is_so = is_so and abs(alone - others) > 0.01
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
