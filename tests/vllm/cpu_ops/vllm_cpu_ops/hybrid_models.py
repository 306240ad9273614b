"""vLLM's models with Mamba2 layers and gated delta nets, with plain torch in place of the ops that a CPU
lacks.

vLLM's registry imports this module only when an engine loads such a model.
"""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops import ssd_combined
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models import granitemoehybrid, qwen3_next
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from vllm_cpu_ops import recurrent


def _gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    context = get_forward_context()
    # The metadata is None while vLLM measures how much memory a step needs.
    if context.attn_metadata is not None:
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        metadata = context.attn_metadata[layer.prefix]
        recurrent.gated_delta_net(layer, metadata, mixed_qkv, b, a, core_attn_out)


ssd_combined._mamba_chunk_scan_combined_fwd = recurrent.chunk_scan
mamba_mixer2.store_prefill_checkpoint = recurrent.store_prefill_checkpoint
gdn_attention.cpu_gdn_attention_core = _gdn_attention_core


class GraniteMoeHybridForCausalLM(granitemoehybrid.GraniteMoeHybridForCausalLM):  # type: ignore[misc]  # vLLM is not installed where types are checked
    pass


class Qwen3NextForCausalLM(qwen3_next.Qwen3NextForCausalLM):  # type: ignore[misc]  # as above
    """Qwen3-Next without experts. Experts would need compiled ops."""

    def set_moe_parameters(self) -> None:
        pass
