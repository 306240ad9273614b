"""Checks vLLM's options: what vLLM says of its command line, and without vLLM what the text of the line shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from kvoffload.checks.check import Check, Finding, Setup, fail, ok, unknown, warn
from kvoffload.checks.launch import Launch
from kvoffload_vllm.command_line import Line
from kvoffload_vllm.register import NAME
from kvoffload_vllm.support import DRAFTS_RUN, ENCODER_DECODER, option_problems

_CORRECT = "correct these options"
_SEGMENTS = "expandable_segments"
_OFFLOADING = "--kv-offloading-size"
_REMEDIES = {
    _SEGMENTS: "take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF, or start vLLM with --enable-cumem-allocator",
    "unrecognized arguments": "remove what this vLLM does not have",
}
"""What to do if vLLM refuses a command line, by a part of its message."""
_REFUSED_SEGMENTS = (
    "vLLM refuses every KV connector with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    _REMEDIES[_SEGMENTS],
)
_REMOVE = f"remove {_OFFLOADING} and --kv-offloading-backend; host_bytes sets kvoffload's host memory"
_Problem = tuple[str, str]
"""A problem and its remedy."""


def options_check(
    line: Line,
    launch: Launch,
    reply: Mapping[str, Any],
    *,
    is_ours: bool,
    is_tier: bool,
    is_encoder_decoder: bool,
) -> Check:
    """Return a check of vLLM's options.

    Args:
        line: the options, as read without vLLM.
        launch: the command line.
        reply: what vLLM says of the command line.
        is_ours: whether the command line names kvoffload's connector.
        is_tier: whether it names kvoffload's tier below vLLM's own connector.
        is_encoder_decoder: whether the model's `config.json` says that it is an encoder-decoder.
    """

    def find(setup: Setup) -> Finding:
        problems = [*_ignored(launch), *_refused(reply)]
        if "connector" in reply:
            problems += _of_configuration(reply, setup, is_ours=is_ours)
        else:
            known = _SEGMENTS in reply.get("refused", "")
            problems += [] if known or not _has_segments(line, launch) else [_REFUSED_SEGMENTS]
            problems += _of_text(line, is_ours=is_ours, is_tier=is_tier)
            problems += (
                [(ENCODER_DECODER, "choose another model")] if is_encoder_decoder and not is_tier else []
            )
        if problems:
            return fail("; ".join(dict(problems)), "; ".join(dict.fromkeys(remedy for _, remedy in problems)))
        return _without_problems(line, reply)

    return Check("vllm options", find)


def _without_problems(line: Line, reply: Mapping[str, Any]) -> Finding:
    if "connector" not in reply:
        reasons = "; ".join([*line.unread, str(reply.get("unknown"))])
        return unknown(f"what vLLM makes of them: {reasons}", reply.get("remedy", ""))
    if reply["warnings"]:
        return warn(f"vLLM {reply['version']} warns: {'; '.join(reply['warnings'])}", _CORRECT)
    if reply["drafts"] not in (None, *DRAFTS_RUN):
        return warn(
            f"vLLM {reply['version']} accepts drafts of the method {reply['drafts']!r:.40}, with which the connector "
            "was never run",
            "compare answers with and without kvoffload first",
        )
    return ok(f"vLLM {reply['version']} accepts them, and the connector works with them")


def _ignored(launch: Launch) -> Iterator[_Problem]:
    for word in launch.arguments:
        if word.startswith("--config="):
            yield f"vLLM does not read the file of {word:.80}", "write --config and the file as two words"


def _refused(reply: Mapping[str, Any]) -> Iterator[_Problem]:
    text = reply.get("refused")
    if text is not None:
        remedy = next((one for part, one in _REMEDIES.items() if part in text), _CORRECT)
        yield f"vLLM {reply['version']} refuses them: {text}", remedy


def _of_configuration(reply: Mapping[str, Any], setup: Setup, *, is_ours: bool) -> Iterator[_Problem]:
    given = (reply["transfer"] or {}).get("kv_connector")
    used = reply["connector"]
    if is_ours and used != given:
        yield f"vLLM uses the connector {used} instead of {given}, because of {_OFFLOADING}", _REMOVE
    for problem in reply["problems"]:
        yield problem, _CORRECT
    config = setup.config
    if config.outlives_engine:
        key = "tier_problems" if config.weights_id is None else "tier_problems_with_weights_id"
        for problem in reply[key]:
            yield problem, _CORRECT


def _of_text(line: Line, *, is_ours: bool, is_tier: bool) -> Iterator[_Problem]:
    values = line.values
    for problem in line.problems:
        yield f"vLLM's command line: {problem}", _CORRECT
    if is_ours and values.get("kv_offloading_size") is not None:
        yield (
            f"with {_OFFLOADING}, vLLM uses its own connector instead of {NAME}, so kvoffload would never run",
            _REMOVE,
        )
    if is_tier:
        return
    ranks = (values.get("tensor_parallel_size") or 1) * (values.get("pipeline_parallel_size") or 1)
    options = SimpleNamespace(**values, world_size=ranks)
    for problem in option_problems(values.get("enable_prefix_caching") is not False, options):
        yield problem, _CORRECT


def _has_segments(line: Line, launch: Launch) -> bool:
    is_set = f"{_SEGMENTS}:True" in launch.whole_environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    is_allowed = line.values.get("enable_cumem_allocator") or line.values.get("enable_sleep_mode")
    return is_set and not is_allowed and line.transfer is not None
