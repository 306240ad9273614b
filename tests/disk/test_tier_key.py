from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.disk.tier_key import LEAST_BYTES, MOST_BYTES, TierKey, read_tier_key
from kvoffload.model.errors import ConfigError

SECRET = bytes(range(LEAST_BYTES))


def write(path: Path, data: bytes = SECRET, mode: int = 0o600) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(data)
    path.chmod(mode)
    return path


# Each function makes a key file that is refused with this part of an error text.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "a link": (lambda path: path.symlink_to(write(path.with_name("real"))), "it is a link"),
    "a pipe": (lambda path: os.mkfifo(path, 0o600), "its mode prw-------"),
    "a folder": (lambda path: path.mkdir(0o700), "Is a directory"),
    "mode 0644": (lambda path: write(path, mode=0o644), "its mode -rw-r--r--"),
    "mode 0640": (lambda path: write(path, mode=0o640), "its mode -rw-r-----"),
    "mode 0620": (lambda path: write(path, mode=0o620), "its mode -rw--w----"),
    "empty": (lambda path: write(path, b""), "its size 0 bytes"),
    "too short": (lambda path: write(path, SECRET[1:]), "its size 31 bytes"),
    "too long": (lambda path: write(path, bytes(MOST_BYTES + 1)), "its size 4,097 bytes"),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_the_error_for_a_bad_key_file_names_the_problem_and_the_rule(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    make(path)
    with pytest.raises(ConfigError) as caught:
        read_tier_key(path)
    [problem] = caught.value.problems
    assert problem.startswith(f"tier_key_file: {path} is not used: ")
    assert said in problem
    assert problem.endswith(
        f"it must be a plain file of user {os.geteuid()} that group and others cannot use (mode 0600 or 0400), of 32 to 4,096 bytes"
    )


def test_a_key_file_with_an_impossible_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not used: File name too long"):
        read_tier_key(tmp_path / ("a" * 300))


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own = write(tmp_path / "key"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match=f"its owner is {own}, its mode -rw-------"):
        read_tier_key(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
@pytest.mark.parametrize("size", [LEAST_BYTES, MOST_BYTES])
def test_the_key_consists_of_all_bytes_of_its_file(size: int, mode: int, tmp_path: Path) -> None:
    ids = set()
    for name, data in (("zeros", bytes(size)), ("line", bytes(size - 1) + b"\n")):
        key = read_tier_key(write(tmp_path / name, data, mode))
        assert key is not None
        assert key.id == TierKey(data).id
        ids.add(key.id)
    assert len(ids) == 2


def test_without_a_file_there_is_no_key() -> None:
    assert read_tier_key(None) is None


def test_a_code_depends_on_key_context_and_data_but_not_on_the_datas_pieces() -> None:
    key = TierKey(SECRET)
    codes = {
        key.mac(b"context", b"data"),
        key.mac(b"contex", b"tdata"),
        key.mac(b"context", b"date"),
        key.of("print").mac(b"context", b"data"),
        key.of("other").mac(b"context", b"data"),
        TierKey(SECRET[::-1]).mac(b"context", b"data"),
    }
    assert len(codes) == 6
    assert key.mac(b"context", b"da", memoryview(b"ta")) in codes
    assert key.sum(b"context", b"data") == int.from_bytes(key.mac(b"context", b"data")[:8], "little")


def test_a_code_is_an_hmac_sha256_that_other_programs_can_check() -> None:
    expected = hmac.digest(SECRET, (7).to_bytes(8, "little") + b"context" + b"data", "sha256")
    assert TierKey(SECRET).mac(b"context", b"data") == expected
