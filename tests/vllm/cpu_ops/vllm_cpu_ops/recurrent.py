"""Recurrent layers in plain torch. They compute token by token in float32, so chunk sizes do not change the
result.

A layer reads each request's state from the slot in the request's row, and writes the new state to this slot.
vLLM's own Python code for CPUs calls the ops in the table at the end of this file. The other functions
replace functions of vLLM (`hybrid_models`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

# -- Mamba2 -----------------------------------------------------------------------------------------------------------


def chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_intermediate_states: bool = False,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_chunk_seqlens: torch.Tensor | None = None,
    last_chunk_indices: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_dtype: torch.dtype | None = None,
    final_states_out: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill `out`. Return the states at the ends of all chunks, or only those of each request's last chunk. The
    caller writes them to `final_states_out` (vLLM 0.33).

    vLLM's own function for CPUs returns only the last states, but models with checkpoints inside a chunk need
    all of them.
    """
    assert z is None
    assert seq_idx is not None
    assert cu_chunk_seqlens is not None
    steps = _time_steps(dt, dt_bias, softplus=dt_softplus).clamp(*dt_limit)
    states = torch.empty(len(seq_idx), *x.shape[1:], B.shape[-1], dtype=state_dtype or x.dtype)
    state, before = torch.empty(0), -1
    for chunk, (row, first, end) in enumerate(
        zip(seq_idx.tolist(), cu_chunk_seqlens[:-1].tolist(), cu_chunk_seqlens[1:].tolist(), strict=True)
    ):
        if row != before:
            begin = torch.zeros(states.shape[1:]) if initial_states is None else initial_states[row]
            state, before = begin.float().clone(), row
        for token in range(first, end):
            state, out[token] = _mamba2_token(
                state, x[token], steps[token, :, None], A[:, None], B[token], C[token], D
            )
        states[chunk] = state
    return states if return_intermediate_states else states[last_chunk_indices]


def store_prefill_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Write each request's state at its checkpoint offset to the block reserved for the checkpoint.

    A request with offset 0 has no checkpoint.
    """
    rows = zip(
        checkpoint.checkpoint_offsets.tolist(),
        checkpoint.state_indices.tolist(),
        chunk_idx.tolist(),
        query_start_loc.tolist(),
        strict=False,  # `query_start_loc` has one more item: the end of the last request
    )
    for offset, block, chunk, start in rows:
        if offset:
            end = start + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk]


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool) -> torch.Tensor:
    wide = dt.float() if bias is None else dt.float() + bias.float()
    return functional.softplus(wide) if softplus else wide


def _mamba2_token(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state `[heads, size, states]` after a token, and the token's output `[heads, size]`.

    `dt` and `A` have the shape `[heads, size or 1]`. `B` and `C` have the shape `[groups, states]`; several
    heads share a group.
    """
    repeats, wide = state.shape[0] // B.shape[0], x.float()
    b, c = (each.float().repeat_interleave(repeats, dim=0) for each in (B, C))
    state = state * torch.exp(dt * A)[..., None] + (dt * wide)[..., None] * b[:, None]
    output = (state @ c[..., None])[..., 0]
    if D is not None:
        output = output + wide * (D if D.dim() > 1 else D[:, None])
    return state, output


def _selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
    dst_state_batch_indices: torch.Tensor | None,
    null_block_id: int,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    if z is not None or num_accepted_tokens is not None or state_batch_indices is None:
        raise NotImplementedError("no gates inside the scan, speculative drafts or unpaged states here")
    steps = _time_steps(dt, dt_bias, softplus=dt_softplus)
    targets = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    for row, (source, target) in enumerate(_pairs(state_batch_indices, targets)):
        if source != null_block_id:
            after, out[row] = _mamba2_token(
                state[source].float(), x[row], steps[row], A[..., 0], B[row], C[row], D
            )
            state[target] = after.to(state.dtype)


def _pairs(sources: torch.Tensor, targets: torch.Tensor) -> Iterable[tuple[int, int]]:
    return zip(sources.flatten().tolist(), targets.flatten().tolist(), strict=True)


# -- gated delta nets -------------------------------------------------------------------------------------------------


def gated_delta_net(
    layer: Any, metadata: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute a layer for all requests of a step, and write the result to `out`.

    vLLM's own function for CPUs supports only bfloat16.
    """
    starts, slots = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
    conv_states, states = layer.kv_cache[0].transpose(-1, -2), layer.kv_cache[1]
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias.float())
    rate = b.float().sigmoid()
    for row in range(metadata.num_decodes + metadata.num_prefills):
        slot, span = int(slots[row]), slice(int(starts[row]), int(starts[row + 1]))
        if row >= metadata.num_decodes and not metadata.has_initial_state[row]:
            conv_states[slot], states[slot] = 0, 0
        mixed = torch.cat([conv_states[slot], mixed_qkv[span].T], dim=1)
        weight = layer.conv1d.weight
        convolved = functional.conv1d(mixed, weight, layer.conv1d.bias, groups=weight.shape[0])
        conv_states[slot] = mixed[:, -conv_states.shape[-1] :]
        query, key, value = layer.rearrange_mixed_qkv(functional.silu(convolved).T)
        states[slot] = _delta_rule(
            states[slot].float(),
            query.squeeze(0).float(),
            key.squeeze(0).float(),
            value.squeeze(0).float(),
            decay[span].exp(),
            rate[span],
            out[span],
        ).to(states.dtype)


def _delta_rule(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out`. Return the state after the last token: `[heads, size of a value, size of a key]`."""
    repeats = value.shape[1] // key.shape[1]
    query, key = (_unit(each).repeat_interleave(repeats, dim=1) for each in (query, key))
    query = query * key.shape[-1] ** -0.5
    for token in range(len(value)):
        state = state * decay[token, :, None, None]
        known = (state @ key[token, :, :, None])[..., 0]
        change = (value[token] - known) * rate[token, :, None]
        state = state + change[..., None] * key[token, :, None]
        out[token] = (state @ query[token, :, :, None])[..., 0]
    return state


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6)


# -- short convolutions -----------------------------------------------------------------------------------------------


def _conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    pad_slot_id: int,
) -> torch.Tensor:
    """Process one token per request. `x` and the result have the shape `[requests, channels]`."""
    if conv_state_indices is None or x.dim() != 2 or x.shape[0] != conv_state_indices.numel():
        raise NotImplementedError("one token a request, with a paged state, and no speculative drafts here")
    slots = conv_state_indices.flatten().long()
    length = weight.shape[1] - 1
    inputs = torch.cat([conv_state[slots, :, :length], x[..., None].to(conv_state.dtype)], dim=-1)
    live = slots != pad_slot_id
    conv_state[slots[live], :, :length] = inputs[live][..., -length:]
    outputs = (inputs * weight).sum(dim=-1)
    outputs = outputs if bias is None else outputs + bias
    return (functional.silu(outputs) if activation else outputs).to(x.dtype)


def _conv1d_weight_pack(weight: torch.Tensor) -> torch.Tensor:
    """Leave the weights unchanged. vLLM 0.30 calls this function for weights of any type."""
    return weight.unsqueeze(1).clone()


OPS: dict[str, Callable[..., object]] = {
    "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation,"
    " Tensor? conv_state_indices, Tensor? query_start_loc, int pad_slot_id) -> Tensor": _conv1d_update,
    "causal_conv1d_weight_pack(Tensor weight) -> Tensor": _conv1d_weight_pack,
    "selective_state_update_cpu(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D,"
    " Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, Tensor? dst_state_batch_indices,"
    " int null_block_id, Tensor(b!) out, Tensor? num_accepted_tokens, Tensor? cu_seqlens)"
    " -> ()": _selective_state_update,
}
