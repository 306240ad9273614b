from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.disk.identity import KVIdentity, groups_of
from kvoffload.disk.tier_key import TierKey
from kvoffload.model.errors import DiskError
from tests.vllm.adapter.stand_ins import cache_config, full, group, vllm_config
from tests.vllm.engine_rig import MARKS
from tests.vllm.stock import checkpoints, engines

pytestmark = MARKS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Settings = Callable[..., Any]
Find = Callable[..., KVIdentity]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def settings(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return a function that makes vLLM's configuration, as if the process started after the files were written."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    monkeypatch.setattr("kvoffload_vllm.kv_identity.process_began_ns", time.time_ns)

    def make(model: Path = checkpoint, **options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        options = {**engines.OPTIONS, **options}
        return EngineArgs(str(model), skip_tokenizer_init=True, **options).create_engine_config()

    return make


@pytest.fixture
def find(tmp_path: Path) -> Find:
    from kvoffload_vllm.groups import vllm_groups
    from kvoffload_vllm.kv_identity import find_identity
    from kvoffload_vllm.support import Features

    caches = cache_config(group(full(32)))
    groups = vllm_groups(vllm_config(), caches, features=Features(), sizes=(32, 32))
    return partial(
        find_identity, groups=groups_of(groups.shape), hash_tokens=groups.hash_tokens, root=tmp_path
    )


def test_weights_change_the_identity_and_their_folder_does_not(
    checkpoint: Path, settings: Settings, find: Find, tmp_path: Path
) -> None:
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    other = checkpoints.make("qwen3", tmp_path / "other", seed=1)  # the same names and sizes
    first, second, third = (find(settings(model)) for model in (checkpoint, moved, other))
    assert first.fingerprint == second.fingerprint
    assert first.weights.startswith("digest ")
    assert first.weights != third.weights
    assert replace(first, weights="") == replace(third, weights="")


def test_with_each_key_and_without_a_key_the_identity_differs(settings: Settings, find: Find) -> None:
    keys = None, TierKey(bytes(32)), TierKey(b"x" * 32)
    found = [find(settings(), by_hand="named", key=key) for key in keys]
    assert len({each.fingerprint for each in found}) == 3
    assert found[1] == find(settings(), by_hand="named", key=TierKey(bytes(32)))


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"dtype": "bfloat16"}, False),
        ({"kv_cache_dtype": "fp8"}, False),
        ({"hf_overrides": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}}, False),
        ({"block_size": 64}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"pipeline_parallel_size": 2}, False),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, False),
        ({"num_gpu_blocks_override": 64}, True),
        ({"gpu_memory_utilization": 0.5}, True),
        ({"max_num_seqs": 3}, True),
        ({"max_model_len": 512}, True),
    ],
    ids=str,
)
def test_settings_that_change_the_kv_change_the_identity_and_sizes_do_not(
    settings: Settings, find: Find, options: dict[str, Any], *, same: bool
) -> None:
    assert (find(settings()).fingerprint == find(settings(**options)).fingerprint) is same


def test_the_ranks_that_share_tokens_and_how_they_share_them_change_the_identity(
    settings: Settings, find: Find
) -> None:
    shared = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    options = ({"tensor_parallel_size": 4}, shared, {**shared, "cp_kv_cache_interleave_size": 16})
    assert len({find(settings(**each)).fingerprint for each in options}) == 3


def test_the_maximum_length_changes_the_identity_if_rope_depends_on_it(
    settings: Settings, find: Find
) -> None:
    """vLLM chooses LongRoPE's factors by comparing `max_model_len` with the model's original length."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    first, second, third = (
        find(settings(hf_overrides={"rope_parameters": rope}, max_model_len=longest))
        for longest in (512, 1024, 512)
    )
    assert first.fingerprint != second.fingerprint
    assert first == third


@pytest.mark.parametrize(
    ("hf_config", "depends"),
    [
        ({"model_type": "qwen3"}, False),
        ({"rope_scaling": None, "quantization_config": {"type": "int"}}, False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, False),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, True),
        ({"text_config": {"rope_scaling": {"type": "su"}}}, True),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ({"rope_scaling": {"rope_type": "one of the future"}}, True),
        ({"model_type": "llama4", "text_config": {}}, True),
    ],
    ids=str,
)
def test_whether_kv_depends_on_the_maximum_length(hf_config: dict[str, Any], *, depends: bool) -> None:
    from kvoffload_vllm.kv_identity import _depends_on_length

    assert _depends_on_length(hf_config) is depends


def test_every_rope_of_vllm_is_known() -> None:
    """If this test finds a new kind of RoPE, check whether its values depend on the longest request."""
    from inspect import getsource

    from vllm.model_executor.layers.rotary_embedding import get_rope

    from kvoffload_vllm.kv_identity import _LENGTHLESS_ROPES

    choices = "".join(re.findall(r"scaling_type (?:==|in) .*", getsource(get_rope)))
    assert set(re.findall(r'"(\w+)"', choices)) - _LENGTHLESS_ROPES == {"dynamic", "longrope"}


def test_every_use_of_the_maximum_length_in_vllm_is_known() -> None:
    """If this test finds a new file, check whether the maximum length changes the KV there, as in Llama 4."""
    import vllm

    root = Path(vllm.__file__).parent / "model_executor"
    decides = re.compile(r"max_model_len *[<>]|[<>]=? *[\w.]*max_model_len")
    paths = [path for part in ("models", "layers") for path in (root / part).rglob("*.py")]
    found = {path.relative_to(root).as_posix() for path in paths if decides.search(path.read_text())}
    only_limits = {"models/config.py", "models/voxtral_realtime.py"}
    # Since vLLM 0.33, another way to the same values of dynamic RoPE, for which the identity has the length.
    same_values = {"models/transformers/utils.py"}
    changes_kv = {"layers/rotary_embedding/phi3_long_rope_scaled_rope.py", "models/llama4.py"}
    assert found - only_limits - same_values == changes_kv


def test_the_hashes_seed_changes_the_identity_and_the_data_parallel_engine_does_not(
    settings: Settings, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    alone = find(config)
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.data_parallel_index = config.parallel_config.data_parallel_rank = 1
    assert find(config) == alone
    monkeypatch.setattr("vllm.v1.core.kv_cache_utils.NONE_HASH", b"another")
    assert find(config).fingerprint != alone.fingerprint


def test_the_weights_of_a_draft_model_change_the_identity(
    checkpoint: Path, settings: Settings, find: Find, tmp_path: Path
) -> None:
    other = checkpoints.make("qwen3", tmp_path / "other", seed=1)
    config = settings()
    alone = find(config)
    found = []
    for model in (checkpoint, other):
        draft = {"draft_model_config": settings(model).model_config, "draft_load_config": None}
        config.speculative_config = SimpleNamespace(method="draft_model", num_speculative_tokens=2, **draft)
        found.append(find(config))
    assert len({alone.fingerprint, *(each.fingerprint for each in found)}) == 3
    assert found[1].weights == f"{alone.weights}, {find(settings(other)).weights}"


def test_a_snapshot_of_the_hub_is_identified_by_its_commit(
    checkpoint: Path, settings: Settings, find: Find, tmp_path: Path
) -> None:
    place = tmp_path / "hub" / "models--org--name"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir()
    for path in checkpoint.iterdir():
        shutil.copy(path, place / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    config = settings(snapshot)
    assert find(config).weights == f"commit {COMMIT}"
    config.model_config.model = "org/name"  # vLLM sets this name if it can reach the hub
    config.model_config.revision = COMMIT
    config.load_config.download_dir = str(tmp_path / "hub")
    assert find(config).weights == f"commit {COMMIT}"
    config.model_config.revision = "f" * 40
    config.model_config.hf_config._commit_hash = None
    with pytest.raises(DiskError, match="cannot be determined"):
        find(config)


def test_weights_that_changed_since_the_process_started_are_refused_unless_named(
    checkpoint: Path, settings: Settings, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    newest = max(path.stat().st_ctime_ns for path in checkpoint.iterdir())
    monkeypatch.setattr("kvoffload_vllm.kv_identity.process_began_ns", lambda: newest - 1)
    with pytest.raises(DiskError, match="has changed since this engine started"):
        find(config)
    assert find(config, by_hand="v7").weights == "named v7"


def test_a_process_started_before_now_and_after_the_machine() -> None:
    from kvoffload.disk.weights import process_began_ns

    began = process_began_ns()
    assert time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) < began < time.time_ns()
    assert abs(began - process_began_ns()) < 10**9


def problems(model: Path, changes: dict[str, Any], *, named: bool = False) -> list[str]:
    from kvoffload_vllm.kv_identity import find_problems

    values = {"model": str(model), "model_weights": "", "prefix_caching_hash_algo": "sha256"}
    everything: Any = SimpleNamespace(**values | {"load_format": "auto", **changes})
    config: Any = SimpleNamespace(speculative_config=None)
    config.model_config = config.cache_config = config.load_config = everything
    return find_problems(config, has_identity=named)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
        ({"load_format": "dummy"}, "weights_id"),
        ({"model_weights": "s3://bucket/model"}, "weights_id"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
    ],
    ids=str,
)
def test_settings_whose_keys_a_restart_could_not_find_are_refused_with_the_remedy(
    checkpoint: Path, changes: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert problems(checkpoint, {}) == []
    (problem,) = problems(checkpoint, changes)
    assert remedy in problem
    assert bool(problems(checkpoint, changes, named=True)) == (remedy != "weights_id")


def test_a_model_of_another_hub_or_in_one_file_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(checkpoint / "config.json", {})
    assert "a file and not a folder" in problem
    monkeypatch.setattr("vllm.envs.VLLM_USE_MODELSCOPE", True, raising=False)
    (problem,) = problems(checkpoint, {})
    assert "ModelScope" in problem


def test_a_seed_that_is_set_is_the_same_in_every_process(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert problems(checkpoint, {"prefix_caching_hash_algo": "xxhash"}) == []
    monkeypatch.delenv("PYTHONHASHSEED")
    # before 0.29, vLLM does not have this function
    monkeypatch.delattr("vllm.v1.core.kv_cache_utils.get_none_hash_seed")
    (problem,) = problems(checkpoint, {})
    assert "PYTHONHASHSEED" in problem
