"""Registries of Ollama's kind."""

from __future__ import annotations

import hashlib
import json

import pytest
from tests.fixtures.pulls import pull
from tests.fixtures.registry import Registry

from localllm.errors import NotFoundAtSource, SourceUnavailable, Unauthorized, Unsupported
from localllm.store.library import ModelStore


@pytest.mark.parametrize("redirects", [True, False])
@pytest.mark.parametrize("wants_token", [True, False])
def test_a_model_is_pulled_byte_for_byte(store: ModelStore, gguf: bytes, redirects: bool, wants_token: bool) -> None:
    layers = {"model": gguf, "system": b"Be kind.", "params": b'{"stop":["X"]}'}
    registry = Registry({"ns/m:v1": layers}, wants_token=wants_token, redirects_blobs=redirects)
    with registry.running():
        name = f"{registry.web.host}/ns/m:v1"
        pulled = pull(store, name, insecure=True)
    assert pulled.error is None
    digests = [event.digest for event in pulled.events if event.total and event.total == event.completed]
    assert list(dict.fromkeys(digests)) == [
        f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers.values()
    ] + [next(digest for digest, data in registry.blobs.items() if data == b'{"model_format":"gguf"}')]
    model = store.resolve(name)
    assert (model.system, model.parameters) == ("Be kind.", {"stop": ["X"]})
    assert store.manifests.path(model.name).read_bytes() == registry.manifests["ns/m:v1"]


def test_a_token_that_runs_out_is_renewed(store: ModelStore, gguf: bytes) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}}, wants_token=True, token_uses=4)
    with registry.running():
        assert pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error is None
        assert len(registry.web.of("/token")) > 1
    assert all(r.path == "/token?service=s&scope=pull" for r in registry.web.of("/token"))


def test_an_unknown_tag_is_said_so(store: ModelStore) -> None:
    with Registry({}).running() as registry:
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert isinstance(error, NotFoundAtSource)
    assert "has no model" in error.message
    assert "ns/m:v1" in error.message


@pytest.mark.parametrize(
    "realm", ["https://evil.example/token", "http://127.0.0.1.evil.example/token", "no address", ""]
)
def test_credentials_are_not_asked_for_at_another_host(store: ModelStore, gguf: bytes, realm: str) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}}, wants_token=True, realm=realm or "http:///token")
    with registry.running():
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert isinstance(error, Unauthorized)
    assert "wants credentials for another host" in error.message


def test_without_insecure_plain_http_is_not_spoken(store: ModelStore, gguf: bytes) -> None:
    with Registry({"ns/m:v1": {"model": gguf}}).running() as registry:
        error = pull(store, f"{registry.web.host}/ns/m:v1").error
        assert registry.web.requests == []
    assert isinstance(error, SourceUnavailable)


def test_a_busy_registry_is_asked_again(store: ModelStore, gguf: bytes) -> None:
    with Registry({"ns/m:v1": {"model": gguf}}, statuses=[503, 429]).running() as registry:
        assert pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error is None


@pytest.mark.parametrize("digest", ["sha256:../../x", "sha256:" + "a" * 63, "sha256:" + "a" * 65])
def test_a_manifest_with_a_bad_digest_writes_nothing(store: ModelStore, gguf: bytes, digest: str) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}})
    good = f"sha256:{hashlib.sha256(gguf).hexdigest()}"
    registry.manifests["ns/m:v1"] = registry.manifests["ns/m:v1"].replace(good.encode(), digest.encode())
    with registry.running():
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert isinstance(error, SourceUnavailable)
    assert "invalid digest" in error.message
    assert not store.root.exists()


@pytest.mark.parametrize("manifest", [b"<html>", b"[]", b"{}", b"x" * (5 << 20)], ids=["html", "list", "empty", "huge"])
def test_what_is_no_manifest_is_refused(store: ModelStore, gguf: bytes, manifest: bytes) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}})
    registry.manifests["ns/m:v1"] = manifest
    with registry.running():
        error = pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error
    assert isinstance(error, SourceUnavailable)
    assert not store.root.exists()


@pytest.mark.parametrize("kinds", [["tensor", "tensor"], ["model", "model"], []])
def test_what_is_not_one_gguf_is_refused_before_the_first_byte(
    store: ModelStore, gguf: bytes, kinds: list[str]
) -> None:
    registry = Registry({"ns/m:v1": {"model": gguf}})
    manifest = json.loads(registry.manifests["ns/m:v1"])
    (layer,) = manifest["layers"]
    manifest["layers"] = [{**layer, "mediaType": f"application/vnd.ollama.image.{kind}"} for kind in kinds]
    registry.manifests["ns/m:v1"] = json.dumps(manifest).encode()
    with registry.running():
        assert isinstance(pull(store, f"{registry.web.host}/ns/m:v1", insecure=True).error, Unsupported)
    assert registry.web.of("/cdn/") == []
