"""What vLLM's speculative decoding calls on a CPU, for draft models, EAGLE heads and n-grams. Greedy requests only.

vLLM's own Python code calls these ops in place of its Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def _accept(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    best: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
) -> None:
    """Write each request's best tokens up to the first that is unlike its draft. If none is, write the bonus token too.

    Args:
        output: `[requests, max_spec_len + 1]`, filled with placeholders.
        ends: for each request, the index after its last draft.
        drafts: the drafts of all requests, one after another.
        best: for each draft, the target's token with the highest probability.
        bonus: for each request, the token after all drafts.
        is_greedy: which requests are greedy; None if all are.
        max_spec_len: the largest number of drafts of a request.
    """
    start = 0
    for row, end in enumerate(ends.tolist()):
        if is_greedy is None or bool(is_greedy[row]):
            right = (drafts[start:end] == best[start:end]).long().cumprod(0)
            accepted = int(right.sum())
            count = min(accepted + 1, end - start)
            output[row, :count] = best[start : start + count]
            if accepted == end - start:
                output[row, accepted] = bonus.flatten()[row]
        start = end


def _prepare_inputs(
    ends: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    indices: torch.Tensor,
    rejected: torch.Tensor,
    requests: int,
) -> None:
    """Write each request's number of rejected drafts, and the index of its last accepted token.

    Args:
        ends: for each request, the index after its last draft.
        counts: each request's number of sampled tokens.
        starts: for each request, the index of its first token; at the end, the number of tokens.
        indices: filled in place.
        rejected: filled in place.
        requests: the number of requests.
    """
    drafts = ends[:requests].diff(prepend=ends.new_zeros(1))
    rejected[:requests] = torch.where(drafts > 0, drafts + 1 - counts[:requests], 0)
    indices[:requests] = (starts[1 : requests + 1] - 1 - rejected[:requests]).to(indices.dtype)


def _prepare_next_tokens(
    sampled: torch.Tensor,
    is_discarded: torch.Tensor,
    backup: torch.Tensor,
    next_tokens: torch.Tensor,
    counts: torch.Tensor,
    vocab_size: int,
    most: int,
    requests: int,
) -> None:
    """Write each request's number of sampled tokens, and the last one; a backup token if there is none."""
    tokens = sampled[:requests, :most]
    is_valid = (tokens != -1) & (tokens < vocab_size) & ~is_discarded[:requests, None]
    counts[:requests] = is_valid.sum(dim=1)
    last = torch.where(is_valid, torch.arange(tokens.shape[1]), 0).amax(dim=1, keepdim=True)
    chosen = tokens.gather(1, last)[:, 0]
    next_tokens[:requests] = torch.where(is_valid.any(dim=1), chosen, backup[:requests])


def _step(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slots: torch.Tensor,
    block_size: int,
    max_model_len: int,
    padding: int,
) -> None:
    """Advance each request by one token. A request at the model's limit goes to position 0, and writes nothing."""
    requests = positions.shape[0]
    is_over = positions + 1 >= max_model_len
    places = torch.where(is_over, 0, positions + 1)
    blocks = (places // block_size).clamp(max=block_table.shape[1] - 1)
    found = block_table[:requests].long().gather(1, blocks[:, None].long())[:, 0]
    out_slots[requests:] = padding
    out_slots[:requests] = torch.where(is_over, padding, found * block_size + places % block_size)
    out_positions[:requests] = places
    lengths = torch.where(is_over, 1, seq_lens[:requests] + 1).clamp(max=max_model_len)
    seq_lens[:requests] = lengths.to(seq_lens.dtype)


def _copy_and_expand(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    next_tokens: torch.Tensor,
    out_tokens: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected: torch.Tensor,
    out_is_masked: torch.Tensor,
    out_new_indices: torch.Tensor,
    out_hidden_mapping: torch.Tensor,
    starts: torch.Tensor,
    lasts: torch.Tensor,
    padding_token: int,
    parallel_token: int,
    total: int,
    slots: int,
    shift: bool,
) -> None:
    """Write a draft model's input: each request's accepted tokens, its next token, and padding for rejected ones."""
    if shift or slots != 1:
        raise NotImplementedError("no parallel drafting here")
    for row, (start, end, last) in enumerate(
        zip(starts[:-1].tolist(), starts[1:].tolist(), lasts.tolist(), strict=True)
    ):
        valid, first = last - start + 1, start + row
        size = end - start + 1
        rejected = slice(first + valid + 1, first + size)
        out_tokens[first : first + valid] = tokens[start : start + valid]
        out_tokens[first + valid] = next_tokens[row]
        out_tokens[rejected] = padding_token
        out_positions[first : first + size] = positions[start] + torch.arange(size)
        out_positions[rejected] = 0
        out_is_rejected[first : first + size] = False
        out_is_rejected[rejected] = True
        out_is_masked[first : first + size] = False
        out_new_indices[row] = first + valid


OPS: dict[str, Callable[..., object]] = {
    "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor ends, Tensor drafts, Tensor best, Tensor bonus,"
    " Tensor? is_greedy, int max_spec_len) -> ()": _accept,
    "eagle_prepare_inputs_padded_kernel_impl(Tensor ends, Tensor counts, Tensor starts, Tensor(a!) indices,"
    " Tensor(b!) rejected, int requests) -> ()": _prepare_inputs,
    "eagle_prepare_next_token_padded_kernel_impl(Tensor sampled, Tensor is_discarded, Tensor backup,"
    " Tensor(a!) next_tokens, Tensor(b!) counts, int vocab_size, int most, int requests) -> ()": _prepare_next_tokens,
    "eagle_step_slot_mapping_metadata_kernel_impl(Tensor positions, Tensor block_table, Tensor(a!) seq_lens,"
    " Tensor(b!) out_positions, Tensor(c!) out_slots, int block_size, int max_model_len, int padding)"
    " -> ()": _step,
    "copy_and_expand_eagle_inputs_kernel_impl(Tensor tokens, Tensor positions, Tensor next_tokens,"
    " Tensor(a!) out_tokens, Tensor(b!) out_positions, Tensor(c!) out_is_rejected, Tensor(d!) out_is_masked,"
    " Tensor(e!) out_new_indices, Tensor(f!) out_hidden_mapping, Tensor starts, Tensor lasts, int padding_token,"
    " int parallel_token, int total, int slots, bool shift) -> ()": _copy_and_expand,
}
