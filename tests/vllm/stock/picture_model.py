"""A small vision-language model with random weights. It is BLIP-2, which vLLM can run without torchvision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.stock import checkpoints

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Blip2Processor

PICTURE_TOKENS = 40  # a picture's tokens come before the prompt
EDGE = 56
_PICTURE = checkpoints.VOCABULARY - 1


def make(folder: Path) -> Path:
    """Write the checkpoint and its processor to `folder`; return `folder`."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}
    sees = transformers.Blip2VisionConfig(image_size=EDGE, patch_size=14, **small)
    asks = transformers.Blip2QFormerConfig(vocab_size=32, encoder_hidden_size=64, **small)
    end = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), checkpoints.END)
    speaks = transformers.OPTConfig(
        vocab_size=checkpoints.VOCABULARY,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=checkpoints.CONTEXT,
        **end,
    )
    model = transformers.Blip2ForConditionalGeneration(
        transformers.Blip2Config(
            vision_config=sees.to_dict(),
            qformer_config=asks.to_dict(),
            text_config=speaks.to_dict(),
            num_query_tokens=PICTURE_TOKENS,
            image_token_index=_PICTURE,
        )
    )
    checkpoints.draw(model, seed=0)
    model.save_pretrained(folder)
    _processor().save_pretrained(folder)
    return folder


def _processor() -> Blip2Processor:
    from tokenizers import AddedToken
    from transformers import Blip2Processor as Processor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = checkpoints.tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), _PICTURE)])
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    pictures = BlipImageProcessorPil(size={"height": EDGE, "width": EDGE})
    return Processor(pictures, tokenizer, num_query_tokens=PICTURE_TOKENS)
