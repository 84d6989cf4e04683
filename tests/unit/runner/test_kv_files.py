"""Prefix files: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from localllm.runner.kv_files import Fetched, KVFiles

KEY = b"k" * 32
TOKENS = list(range(300))
DATA = bytes(range(256)) * 40


class Files:
    def __init__(self, folder: Path, *, key: bytes = KEY, budget: int = 1 << 20, max_tokens: int = 1000) -> None:
        self.reports: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self.files = KVFiles(folder, key, budget, self.reports.put)
        self.found = self.files.start(max_tokens)

    def write(self, tokens: list[int], data: bytes = DATA) -> int:
        id = self.files.write(tokens, data)
        assert id is not None and self.files.flush(5)
        return id

    def read(self, id: int) -> bytes | None:
        self.files.read(id)
        answer = self.reports.get(timeout=5)
        assert answer.id == id
        return answer.data


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*/*.kv")
    return path


def test_what_one_process_writes_the_next_one_reads(tmp_path: Path) -> None:
    Files(tmp_path).write(TOKENS)
    again = Files(tmp_path)
    assert list(again.found.values()) == [TOKENS]
    assert again.read(next(iter(again.found))) == DATA


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    Files(tmp_path).write(TOKENS)
    assert only_file(tmp_path).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("offset", [0, 20, 45, 60, 90, 2000, -1])
def test_a_file_with_a_wrong_byte_is_not_believed_and_removed(tmp_path: Path, offset: int) -> None:
    Files(tmp_path).write(TOKENS)
    content = bytearray(only_file(tmp_path).read_bytes())
    content[offset] ^= 1
    only_file(tmp_path).write_bytes(content)
    again = Files(tmp_path)
    for id in again.found:
        assert again.read(id) is None
    assert not list(tmp_path.glob("*/*.kv"))


@pytest.mark.parametrize("content", [b"", b"short", os.urandom(500)])
def test_a_foreign_file_is_ignored_and_removed(tmp_path: Path, content: bytes) -> None:
    Files(tmp_path).write(TOKENS)
    path = only_file(tmp_path)
    path.write_bytes(content)
    assert Files(tmp_path).found == {}
    assert not path.exists()


def test_another_models_memory_is_never_looked_at(tmp_path: Path) -> None:
    Files(tmp_path).write(TOKENS)
    assert Files(tmp_path, key=b"o" * 32).found == {}
    assert only_file(tmp_path).exists()


def test_a_file_that_does_not_fit_the_window_is_left_to_others(tmp_path: Path) -> None:
    Files(tmp_path).write(TOKENS)
    assert Files(tmp_path, max_tokens=299).found == {}
    assert len(Files(tmp_path, max_tokens=300).found) == 1


def test_the_budget_holds_for_all_models_and_the_longest_unused_goes(tmp_path: Path) -> None:
    other = Files(tmp_path, key=b"o" * 32, budget=3 * 12_000)
    oldest = other.write(TOKENS)
    os.utime(only_file(tmp_path), (1, 1))
    ours = Files(tmp_path, budget=3 * 12_000)
    ids = [ours.write([number, *TOKENS]) for number in range(3)]
    assert other.read(oldest) is None
    assert [ours.read(id) for id in ids] == [DATA] * 3


def test_whoever_loses_a_file_to_the_budget_is_told(tmp_path: Path) -> None:
    files = Files(tmp_path, budget=15_000)
    first = files.write(TOKENS)
    files.write([1, *TOKENS])
    assert files.reports.get(timeout=5) == Fetched(first, None)


def test_what_can_never_fit_is_reported_as_gone(tmp_path: Path) -> None:
    files = Files(tmp_path, budget=100)
    id = files.write(TOKENS)
    assert files.reports.get(timeout=5) == Fetched(id, None)
    assert not list(tmp_path.glob("*/*"))


def test_a_folder_that_cannot_be_made_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = Files(tmp_path / "file")
    assert files.found == {}
    id = files.write(TOKENS)
    assert files.reports.get(timeout=5) == Fetched(id, None)


def test_deleting_one_of_two_entries_of_the_same_tokens_keeps_the_file(tmp_path: Path) -> None:
    files = Files(tmp_path)
    first, second = files.write(TOKENS), files.write(TOKENS)
    files.files.delete(first)
    assert files.read(second) == DATA
