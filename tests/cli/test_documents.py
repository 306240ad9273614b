"""Where the text comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload.cli.demo import documents
from kvoffload.cli.demo.documents import project_documents, read_text
from kvoffload.cli.exits import CommandError


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_documents_follow_one_another_as_far_as_needed(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", "0123"), written(tmp_path / "b", "456789")
    text = read_text([first, second], 7)
    assert (text.tokens, text.documents, text.library_tokens) == (b"0123456", ("a", "b"), 0)


def test_the_same_document_twice_is_read_twice(tmp_path: Path) -> None:
    path = written(tmp_path / "a", "0123")
    text = read_text([path, path], 6)
    assert (text.tokens, text.documents) == (b"012301", ("a", "a"))


def test_a_document_that_is_not_reached_is_not_named(tmp_path: Path) -> None:
    text = read_text([written(tmp_path / "a", "0123"), written(tmp_path / "b", "4")], 3)
    assert (text.tokens, text.documents) == (b"012", ("a",))


def test_pythons_library_follows(tmp_path: Path) -> None:
    text = read_text([written(tmp_path / "a", "0123")], 100_000)
    assert text.tokens.startswith(b"0123")
    assert (len(text.tokens), text.library_tokens) == (100_000, 99_996)


def test_an_endless_document_is_read_as_far_as_needed() -> None:
    assert read_text([Path("/dev/zero")], 1000).tokens == bytes(1000)


def test_the_projects_documents_are_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "README.md", "read me first")
    written(tmp_path / "CHANGELOG.md", "")
    found = project_documents()
    assert tmp_path / "README.md" in found
    assert tmp_path / "CHANGELOG.md" not in found  # empty: as good as none


def test_without_any_document_there_is_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "project_documents", list)
    text = read_text([], 10)
    assert (len(text.tokens), text.documents, text.library_tokens) == (10, (), 10)


def test_too_little_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(CommandError, match="need 10 bytes of text, and there are 4: add --document"):
        read_text([written(tmp_path / "a", "0123")], 10)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere cannot be read: No such file"):
        read_text([tmp_path / "nowhere"], 10)


def test_a_wrong_name_is_an_error_also_where_it_is_not_reached(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere cannot be read"):
        read_text([written(tmp_path / "a", "0123"), tmp_path / "nowhere"], 2)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read: Is a directory"):
        read_text([tmp_path], 10)


def test_a_name_that_is_none() -> None:
    with pytest.raises(CommandError, match="cannot be read: embedded null"):
        read_text([Path("a\0b")], 10)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    written(tmp_path / "a", "0123").chmod(0)
    with pytest.raises(CommandError, match="cannot be read: Permission denied"):
        read_text([tmp_path / "a"], 10)


def test_empty(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is empty"):
        read_text([written(tmp_path / "a", "")], 10)
