from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvoffload.checks.options import read_settings
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.model.config import parse_config
from kvoffload.model.peers import PEERS, Counterpart
from tests.tooling.scripts import ROOT

DISK = """
# of LMCache's documentation: the disk below host memory
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
local_disk: "file:///local/disk_test/local_disk/"
max_local_disk_size: 2.5
min_retrieve_tokens: 512
extra_config: {'use_odirect': True}
"""

MOONCAKE = """
local_cpu: False
max_local_cpu_size: 5
remote_url: "mooncakestore://127.0.0.1:50051/"
remote_serde: "naive"
extra_config:
  protocol: "rdma"
  master_server_address: "localhost:50051"
  global_segment_size: 3355443200
"""

S3 = """
max_local_cpu_size: 48
local_disk: false
remote_url: "s3://AKIA-ID:hunter2@lmcache-bucket.s3.us-east-1.amazonaws.com"
save_unfull_chunk: null
extra_config:
  s3_region: "us-east-1"
  s3_file_prefix: "test-2/"
  aws_access_key_id: "hunter2"
  aws_secret_access_key: "hunter2"
"""


def connector(name: str, **extra: object) -> dict[str, object]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def converted(capsys: pytest.CaptureFixture[str], source: object, *more: str) -> tuple[dict, list[str]]:
    """Convert a file or an object. Return our settings, and the lines on standard error without the first."""
    text = str(source) if isinstance(source, Path) else json.dumps(source)
    assert main(["settings", "--from", text, *more]) == 0
    out, err = capsys.readouterr()
    assert "hunter2" not in out + err
    settings = json.loads(out)
    parse_config({"host_bytes": 1, **settings})
    assert read_settings([out], "--config") == settings  # what vllm-args and the doctor read
    return settings, err.splitlines()[1:]


def refused(capsys: pytest.CaptureFixture[str], source: str) -> str:
    assert main(["settings", "--from", source]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "hunter2" not in err
    return err.removeprefix("kvoffload: error: ").rstrip()


@pytest.mark.parametrize(
    ("text", "settings", "keys"),
    [
        (
            DISK,
            {
                "host_bytes": "10GiB",
                "disk_path": "/local/disk_test/local_disk/",
                "disk_bytes": "5GiB",
                "min_load_tokens": 512,
            },
            ["chunk_size", "extra_config.use_odirect"],
        ),
        (
            MOONCAKE,
            {"host_bytes": "10GiB", "remote_url": "mooncake://127.0.0.1:50051?protocol=rdma"},
            ["local_cpu", "extra_config.master_server_address", "extra_config.global_segment_size"],
        ),
        (
            S3,
            {"host_bytes": "96GiB", "remote_url": "s3://lmcache-bucket/test-2"},
            [f"extra_config.{key}" for key in ("s3_region", "aws_access_key_id", "aws_secret_access_key")],
        ),
    ],
)
def test_lmcaches_file_gives_our_settings_and_a_line_for_each_other_key(
    text: str, settings: dict, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "lmcache.yaml").write_text(text)
    ours, lines = converted(capsys, file, "--ranks", "2")
    assert ours == settings
    assert sorted(line.split(": ")[0] for line in lines) == sorted(keys)


TIERS = [
    {"type": "fs", "root_dir": "/disk", "n_read_threads": 4},
    {"type": "obj", "prefix": "kv", "store_config": {"bucket": "b", "secret_key": "hunter2"}},
    {"type": "p2p", "host": "hunter2"},
    {"root_dir": "/of/no/type"},
]


@pytest.mark.parametrize(
    ("given", "settings", "keys"),
    [
        (
            connector("OffloadingConnector", cpu_bytes_to_use=2**33, eviction_policy="lru", block_size=64),
            {"host_bytes": "8GiB"},
            ["block_size"],
        ),
        (
            connector(
                "OffloadingConnector",
                cpu_bytes_to_use=3,
                spec_name="TieringOffloadingSpec",
                secondary_tiers=TIERS,
            ),
            {"host_bytes": 3, "disk_path": "/disk", "remote_url": "s3://b/kv"},
            [
                f"secondary_tiers.{key}"
                for key in ("fs.n_read_threads", "obj.store_config.secret_key", "p2p", "?")
            ],
        ),
        (
            connector(
                "SimpleCPUOffloadConnector",
                cpu_bytes_to_use=2**30,
                cpu_bytes_to_use_per_rank=2**31,
                lazy_offload=True,
            ),
            {"host_bytes": "8GiB", "store_policy": "lazy"},
            ["cpu_bytes_to_use"],
        ),
        (
            connector("LMCacheConnectorV1", **{"lmcache.max_local_cpu_size": 0.5, "lmcache.chunk_size": 16}),
            {"host_bytes": "2GiB"},
            ["lmcache.chunk_size"],
        ),
        (
            connector("LMCacheMPConnector", **{"lmcache.mp.host": "h", "lmcache.mp.lazy_offload": False}),
            {"store_policy": "eager"},
            ["lmcache.mp.host", "host_bytes"],
        ),
        (
            connector(
                "MultiConnector",
                connectors=[
                    connector("NixlConnector"),
                    connector("OffloadingConnector", cpu_bytes_to_use=2**20),
                ],
            ),
            {"host_bytes": "1MiB"},
            [],
        ),
        (
            {"kv-transfer-config": connector("OffloadingConnector", cpu_bytes_to_use=1), "model": "m"},
            {"host_bytes": 1},
            [],
        ),
        (
            {"kv_transfer_config": json.dumps(connector("OffloadingConnector", cpu_bytes_to_use=1))},
            {"host_bytes": 1},
            [],
        ),
        (
            {"--l1-size-gb": 100, "--port": 5555, "chunk-size": 256},
            {"host_bytes": "100GiB"},
            ["--port", "chunk-size"],
        ),
        (
            {"kv-offloading-size": 64, "kv-offloading-backend": "native"},
            {"host_bytes": "64GiB"},
            ["kv-offloading-backend"],
        ),
        ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "20", "LMCACHE_LOCAL_CPU": "True"}, {"host_bytes": "80GiB"}, []),
        (
            {
                "DYN_KVBM_CPU_CACHE_GB": "100",
                "DYN_KVBM_DISK_CACHE_GB": 200,
                "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
                "DYN_KVBM_OBJECT_BUCKET": "kv-{worker_id}",
            },
            {"host_bytes": "100GB", "disk_bytes": "200GB", "disk_min_hits": 0},
            ["DYN_KVBM_OBJECT_BUCKET", "disk_path"],
        ),
        (
            connector(
                "DynamoConnector",
                leader={"cache": {"host": {"cache_size_gb": 2.0}}, "tokio": {"worker_threads": 2}},
            ),
            {"host_bytes": "2GB"},
            ["leader.tokio"],
        ),
    ],
)
def test_connectors_and_variables_are_recognised(
    given: dict, settings: dict, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, lines = converted(capsys, given, "--ranks", "4")
    assert ours == settings
    assert sorted(line.split(": ")[0] for line in lines) == sorted(keys)


@pytest.mark.parametrize(
    ("url", "protocol", "ours"),
    [
        ("mooncakestore://h:1", "tcp", "mooncake://h:1"),
        ("mooncakestore://user:hunter2@h:1/?key=hunter2", "tcp", "mooncake://h:1"),
        ("mooncakestore://h:1", "hunter2", None),
        ("mooncakestore://h", "tcp", None),
        ("mooncakestore://h:1,i:2/", "tcp", None),
        ("mooncakestore://[::1]:1/", "tcp", None),
        ("s3://bucket", "tcp", "s3://bucket"),
        ("s3://bucket.storage.example:9000", "tcp", None),
        ("s3://b.s3express-1.us-east-1.amazonaws.com", "tcp", None),
        ("redis://user:hunter2@h:1", "tcp", None),
        ("hunter2", "tcp", None),
        (7, "tcp", None),
    ],
)
def test_a_store_is_converted_or_has_a_line(
    url: object, protocol: str, ours: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"max_local_cpu_size": 1, "remote_url": url, "extra_config": {"protocol": protocol}}
    settings, lines = converted(capsys, given, "--ranks", "1")
    assert settings.get("remote_url") == ours
    assert [line.split(": ")[0] for line in lines] == ([] if ours else ["remote_url"])


def test_sizes_of_one_rank_are_named_if_the_ranks_are_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert converted(capsys, {"max_local_cpu_size": 1}) == (
        {"host_bytes": "1GiB"},
        ["max_local_cpu_size: counts one rank; if an engine has several, give --ranks"],
    )


def test_ranks_without_a_source_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--ranks", "2"]) == Exit.USAGE
    assert capsys.readouterr() == ("", "kvoffload: error: --ranks needs --from\n")


def test_the_product_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["settings", "--from", '{"max_local_cpu_size": 1}'])
    assert capsys.readouterr().err.startswith("read as settings of LMCache in process\n")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (
            '{"kv-offloading-backend": "native"}',
            "--from: no key of vLLM's --kv-offloading-size has a counterpart; ",
        ),
        ("{", "--from is not JSON: Expecting property name"),
        ("missing.yaml", "--from missing.yaml is neither a JSON object nor a file that can be read"),
        ('[{"key": "hunter2"}]', "--from is neither a JSON object nor a file that can be read"),
        ("a\0b", "--from is neither a JSON object nor a file that can be read"),
        ("{}", "--from has neither kv_connector nor a key of LMCache in process, "),
        ('{"aws": "hunter2"}', "--from has neither kv_connector nor a key of LMCache in process, "),
        ('{"kv_connector": "NixlConnector"}', "--from: kv_connector must be one of LMCacheConnectorV1, "),
        (
            '{"kv_connector": ["hunter2"], "kv_connector_extra_config": 3}',
            "--from: kv_connector must be one of ",
        ),
        (
            '{"kv_connector": "LMCacheConnectorV1"}',
            "--from: no key of LMCache in process has a counterpart; its settings ",
        ),
        (
            '{"kv_connector": "DynamoConnector", "kv_connector_extra_config": {"x": 1}}',
            "--from: no key of Dynamo's KVBM ",
        ),
        ('{"max_local_cpu_size": "hunter2"}', "--from: max_local_cpu_size must be a number, 0 or more"),
        ('{"max_local_cpu_size": -1}', "--from: max_local_cpu_size must be a number, 0 or more"),
        ('{"max_local_cpu_size": true}', "--from: max_local_cpu_size must be a number, 0 or more"),
        ('{"max_local_cpu_size": 1e20}', "--from: host_bytes is "),
        (
            '{"min_retrieve_tokens": "hunter2"}',
            "--from: min_retrieve_tokens must be a number of tokens, 0 or more",
        ),
        ('{"local_disk": ["hunter2"]}', "--from: local_disk must be a folder's path"),
        ('{"lazy_offload": "hunter2"}', "--from: lazy_offload must be true or false"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(
    source: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, source).startswith(error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nkey: 'hunter2\n b: [", "is neither JSON nor YAML in line 3"),
        ("- hunter2", "does not hold keys with values"),
        ("a: 1\n---\na: 2\n", "does not hold keys with values"),
        (
            "a0: &0 {x: hunter2}\n"
            + "".join(f"a{n}: &{n} {{<<: *{n - 1}, b: *{n - 1}}}\n" for n in range(1, 19)),
            "is too long: with its aliases written out, it may have 1,048,576 characters",
        ),
        ("", "does not hold keys with values"),
        ("max_local_cpu_size: lots", "max_local_cpu_size must be a number, 0 or more"),
        ("kv_connector: !!python/object/apply:os.system ['hunter2']", "is neither JSON nor YAML in line 1"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_place(
    text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "lmcache.yaml").write_text(text)
    said = refused(capsys, str(file))
    assert said.startswith(f"--from {file}")
    assert error in said


def test_without_pyyaml_only_json_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (file := tmp_path / "lmcache.yaml").write_text("max_local_cpu_size: 1")
    assert "pip install pyyaml" in refused(capsys, str(file))
    file.write_text('{"max_local_cpu_size": 1}')
    assert converted(capsys, file)[0] == {"host_bytes": "1GiB"}


def row(key: str, counterpart: Counterpart) -> str:
    setting = f"`{counterpart.setting}`" if counterpart.setting else "none"
    return f"| `{key}` | {setting} | {counterpart.note} |"


@pytest.mark.parametrize("product", PEERS)
def test_the_page_has_the_tables_rows(product: str) -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(product)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(*item) for item in PEERS[product].keys.items()]
