"""Plain torch implementations of the ops that vLLM's CPU worker calls, by name and schema."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from vllm_cpu_ops import drafts, recurrent
from vllm_cpu_ops.attention import Pages, attend, store
from vllm_cpu_ops.slot_mapping import fill_slots

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

_library = torch.library.Library("_C", "FRAGMENT")  # The ops exist as long as this object exists.


def define_missing() -> None:
    """Define every op of the table that this process does not have yet."""
    for schema, body in {**OPS, **recurrent.OPS, **drafts.OPS}.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            _library.define(schema)
            _library.impl(name, body, "CompositeExplicitAutograd")


def _init_cpu_memory_env(nodes: list[int]) -> None:
    pass


def _get_scheduler_metadata(*_: object) -> torch.Tensor:
    return torch.empty(0)


def _reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    count = slot_mapping.shape[0]
    keys, values = (_typed(cache, kv_cache_dtype) for cache in (key_cache, value_cache))
    store(key[:count] / k_scale, value[:count] / v_scale, keys, values, slot_mapping)


def _attention_with_kv_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    if alibi_slopes is not None or s_aux is not None or dynamic_causal is not None:
        raise NotImplementedError("no ALiBi slopes, attention sinks or dynamic causality here")
    keys, values = (_typed(cache, kv_cache_dtype) for cache in (key_cache, value_cache))
    pages = Pages(keys, values, scale * k_scale, sliding_window, softcap, causal)
    attend(query, output, query_start_loc, seq_lens, block_table, pages)
    if v_scale != 1:
        output.mul_(v_scale)


def _typed(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """Return the cache as a tensor of its real type. vLLM passes 8-bit floats as bytes."""
    if kv_cache_dtype in FLOAT8:
        return cache.view(FLOAT8[kv_cache_dtype])
    if kv_cache_dtype != "auto" and not kv_cache_dtype.startswith(("float", "bfloat")):
        raise NotImplementedError(f"no KV cache of type {kv_cache_dtype} here")
    return cache


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1).view(-1)


def _fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sample one token per row from the softmax of its logits. The same seed gives the same token."""
    noise = torch.empty_like(logits)
    for row, seed in zip(noise, seeds.tolist(), strict=True):
        row.exponential_(generator=torch.Generator().manual_seed(seed))
    return (logits - noise.log()).argmax(dim=-1)


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def apply(out: torch.Tensor, gate_and_value: torch.Tensor) -> None:
        gate, value = gate_and_value.chunk(2, dim=-1)
        out.copy_(activation(gate) * value)

    return apply


def _rms_norm(out: torch.Tensor, states: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    wide = states.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    out.copy_(normed if weight is None else normed * weight.float())


def _fused_add_rms_norm(
    states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    residual.add_(states)
    _rms_norm(states, residual, weight, epsilon)


# The schema of each op, with the argument types that vLLM passes, and the op's implementation. Versions after
# 0.30 do not call the last five ops.
OPS: dict[str, Callable[..., object]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": _init_cpu_memory_env,
    "get_scheduler_metadata(int num_reqs, int num_heads, int num_kv_heads, int head_dim, Tensor seq_lens,"
    " ScalarType dtype, Tensor query_start_loc, bool causal, int window, str isa, bool split,"
    " Tensor? dynamic_causal, str kv_cache_dtype) -> Tensor": _get_scheduler_metadata,
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str isa, float k_scale, float v_scale, str kv_cache_dtype)"
    " -> ()": _reshape_and_cache,
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output,"
    " Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, int window,"
    " Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux,"
    " Tensor? dynamic_causal, float k_scale, float v_scale, str kv_cache_dtype)"
    " -> ()": _attention_with_kv_cache,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table,"
    " Tensor(a!) slot_mapping, int block_size) -> ()": fill_slots,
    "greedy_argmax(Tensor logits) -> Tensor": _greedy_argmax,
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": _fused_gumbel_argmax,
    "silu_and_mul(Tensor(a!) out, Tensor states) -> ()": _gated(functional.silu),
    "gelu_and_mul(Tensor(a!) out, Tensor states) -> ()": _gated(functional.gelu),
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor states) -> ()": _gated(
        lambda gate: functional.gelu(gate, approximate="tanh")
    ),
    "rms_norm(Tensor(a!) out, Tensor states, Tensor? weight, float epsilon) -> ()": _rms_norm,
    "fused_add_rms_norm(Tensor(a!) states, Tensor(b!) residual, Tensor? weight, float epsilon)"
    " -> ()": _fused_add_rms_norm,
}
