"""Makes a small Llama, and an EAGLE head whose drafts the model mostly accepts, from random weights.

The head has copies of all of the model's layers. It ignores the model's hidden states and reads the embedding of the
next token, so at each position it computes what the model computes at the next one. Only the first token of a text is
missing from what it attends to.

A head has no norm before its first layer and none after its last. So each row of the model's embedding is scaled such
that the first norm does not change it. The last norm does not change which token has the highest logit.

Attention counts so little in the model that its answers run into cycles, in which n-grams find drafts. It still counts
enough that another context changes the tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.vllm.stock import checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = 2
ATTENTION = 0.15
FIRST_NORM = "layers.0.input_layernorm.weight"


def make_target(folder: Path) -> Path:
    """Write the model to `folder`, unless it is there; return `folder`."""
    if not (folder / "tokenizer.json").exists():
        model = _target()
        model.save_pretrained(folder)
        checkpoints.tokenizer().save_pretrained(folder)
    return folder


def make_head(folder: Path) -> Path:
    """Write the model's EAGLE head to `folder`, replacing an existing one; return `folder`."""
    import torch
    from safetensors.torch import save_file

    model, size = _target(), checkpoints.SHAPE["hidden_size"]
    weights = {
        name.removeprefix("model."): weight.detach().clone()
        for name, weight in model.named_parameters()
        if name.startswith("model.layers.")
    }
    del weights[FIRST_NORM]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    return folder


def _target() -> PreTrainedModel:
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=LAYERS, **checkpoints.SHAPE)
    )
    checkpoints.draw(model, seed=0)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.div_(embedding.square().mean(dim=1, keepdim=True).sqrt())
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(ATTENTION)
    return model
