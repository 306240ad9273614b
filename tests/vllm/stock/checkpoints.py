"""Makes small checkpoints with random weights, which are the same on every machine.

There are models with full attention, with sliding windows and with recurrent layers. The weights have a wide
spread, so that every token depends on the whole context, and a block of wrong KV changes the tokens. The
tokenizer has one token per byte, so that servers also accept text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.vllm.stock import hybrids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Kind = Literal["qwen3", "gemma3", "lfm2", "granite4", "qwen3_next"]
KINDS: tuple[Kind, ...] = ("qwen3", "gemma3")
RECURRENT: tuple[Kind, ...] = ("lfm2", "granite4", "qwen3_next")
"""Models with recurrent layers have separate tests."""

VOCABULARY = 320  # 256 bytes, the end-of-text token, and unused tokens
END = 256
WINDOW = 80  # not a multiple of the block size, so that windows begin inside a block
WIDTH = 0.15  # the standard deviation of the weights
CONTEXT = 4096

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
# With this shape, computing a prompt takes long enough to be compared with loading it.
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)


def make(kind: Kind, folder: Path, *, seed: int = 0, **shape: int) -> Path:
    """Write the checkpoint to `folder`, unless it is there; return `folder`. `shape` overrides `SHAPE`."""
    done = folder / "made.json"
    recipe = json.dumps({"kind": kind, "seed": seed, "width": WIDTH, "window": WINDOW, **SHAPE, **shape})
    if done.exists() and done.read_text() == recipe:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = _model(kind, {**SHAPE, **shape})
    draw(model, seed)
    model.save_pretrained(folder)
    hybrids.complete_config(folder)
    tokenizer().save_pretrained(folder)
    done.write_text(recipe)
    return folder


def _model(kind: Kind, shape: dict[str, Any]) -> PreTrainedModel:
    import transformers

    if kind in RECURRENT:
        build = {"lfm2": hybrids.lfm2, "granite4": hybrids.granite4, "qwen3_next": hybrids.qwen3_next}
        return build[kind](shape)
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{"num_hidden_layers": 2, **shape}))
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=WINDOW,
        query_pre_attn_scalar=shape["head_dim"],
        **shape,
    )
    return transformers.Gemma3ForCausalLM(config)


def draw(model: PreTrainedModel, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:  # normalization layers keep their initial weights
                weight.normal_(0.0, WIDTH, generator=generator)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast as Fast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    wrapped = Fast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
