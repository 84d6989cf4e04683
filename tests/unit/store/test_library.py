"""The store as its users see it, on Ollama's layout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.fixtures.ggufs import TEMPLATE, write_gguf

from localllm.errors import InvalidModelFile, InvalidRequest, LocalLLMError, ModelNotFound, NoSpace, StoreError
from localllm.store import blobs
from localllm.store.library import ModelStore
from localllm.store.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    MODEL_LAYER,
    Layer,
    Manifest,
    ManifestStore,
    ModelConfig,
)
from localllm.store.names import ModelName


def put_blob(root: Path, data: bytes) -> dict[str, object]:
    """Write a blob the way Ollama does; returns the layer fields."""
    digest = hashlib.sha256(data).hexdigest()
    path = root / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def put_model(root: Path, name: str, gguf: bytes, **layers: bytes) -> Path:
    """A model as Ollama would have stored it; `layers` by their short type."""
    parts = {"model": gguf, **layers}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, **put_blob(root, b'{"model_format":"gguf","model_family":"llama"}')},
        "layers": [
            {"mediaType": f"application/vnd.ollama.image.{kind}", **put_blob(root, data)}
            for kind, data in parts.items()
        ],
    }
    parsed = ModelName.parse(name)
    path = root / "manifests" / parsed.host / parsed.namespace / parsed.model / parsed.tag
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(".new")
    scratch.write_text(json.dumps(manifest))
    return scratch.replace(path)


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "source.gguf", template=TEMPLATE).read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_store_of_ollamas_is_understood(root: Path, gguf: bytes) -> None:
    manifest = put_model(
        root,
        "mine:7b",
        gguf,
        system=b"Be brief.",
        params=b'{"temperature":0.1,"stop":["END"]}',
        messages=b'[{"role":"user","content":"hi"}]',
        license=b"MIT",
        template=b"{{ .System }}",
    )
    model = ModelStore(root).resolve("mine:7b")
    assert model.system == "Be brief."
    assert model.parameters == {"temperature": 0.1, "stop": ["END"]}
    assert [(m.role, m.content) for m in model.messages] == [("user", "hi")]
    assert (model.licenses, model.config.model_family) == (("MIT",), "llama")
    assert model.template == "{{ .System }}"
    assert model.model_path.read_bytes() == gguf
    assert model.digest == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert model.capabilities == ("completion",)


def test_what_is_written_has_ollamas_keys_in_ollamas_order() -> None:
    config = ModelConfig(model_family="llama", model_families=("llama",), model_type="1B", file_type="Q4_0")
    assert msgspec.json.encode(config) == (
        b'{"model_format":"gguf","model_family":"llama","model_families":["llama"],"model_type":"1B",'
        b'"file_type":"Q4_0","architecture":"amd64","os":"linux"}'
    )
    digest = "sha256:" + "a" * 64
    manifest = Manifest(config=Layer(CONFIG_TYPE, digest, 7), layers=(Layer(MODEL_LAYER, digest, 9),))
    assert msgspec.json.encode(manifest).decode() == (
        f'{{"schemaVersion":2,"mediaType":"{MANIFEST_TYPE}",'
        f'"config":{{"mediaType":"{CONFIG_TYPE}","digest":"{digest}","size":7}},'
        f'"layers":[{{"mediaType":"{MODEL_LAYER}","digest":"{digest}","size":9}}]}}'
    )


@pytest.mark.parametrize(
    ("jinja", "go", "capabilities"),
    [
        ("", "", {"completion"}),
        ("", "{{ .Tools }} {{ .Suffix }} {{ .Thinking }}", {"completion", "tools", "insert", "thinking"}),
        # The template of the file is used, so Ollama's own says nothing of what will happen.
        (TEMPLATE, "{{ .Tools }} {{ .Thinking }}", {"completion"}),
        ("{% if tools %}{% endif %}", "", {"completion", "tools"}),
        ("<think>{{ x }}</think>", "", {"completion", "thinking"}),
        ("{{ x.split('</think>')[-1] }}", "", {"completion", "thinking"}),
        ("<think>", "", {"completion"}),
    ],
)
def test_templates_tell_what_a_model_can_do(
    root: Path, tmp_path: Path, jinja: str, go: str, capabilities: set[str]
) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", template=jinja).read_bytes()
    put_model(root, "m", gguf, template=go.encode())
    assert set(ModelStore(root).resolve("m").capabilities) == capabilities


def test_files_tell_what_a_model_can_do(root: Path, tmp_path: Path, gguf: bytes) -> None:
    put_model(root, "sees", gguf, projector=gguf)
    put_model(root, "embeds", write_gguf(tmp_path / "e.gguf", arch="bert", pooling=1).read_bytes())
    store = ModelStore(root)
    assert store.resolve("sees").capabilities == ("completion", "vision")
    assert store.resolve("embeds").capabilities == ("embedding",)


def test_a_template_under_its_old_name_is_found(root: Path, gguf: bytes) -> None:
    put_model(root, "m", gguf, prompt=b"{{ .Prompt }}")
    assert ModelStore(root).resolve("m").template == "{{ .Prompt }}"


def test_reading_an_absent_store_creates_nothing(root: Path) -> None:
    store = ModelStore(root)
    assert store.list() == []
    with pytest.raises(ModelNotFound):
        store.resolve("x")
    assert not root.exists()


def test_names_are_found_whatever_their_case(root: Path, gguf: bytes) -> None:
    put_model(root, "Mixed:Case", gguf)
    assert ModelStore(root).resolve("mixed:case").name.display == "Mixed:Case"


def test_an_unknown_name_suggests_what_is_near(root: Path, gguf: bytes) -> None:
    put_model(root, "my-assistant", gguf)
    with pytest.raises(ModelNotFound) as caught:
        ModelStore(root).resolve("my-asistant")
    assert "my-assistant" in caught.value.hint


def test_a_name_of_the_catalogue_says_how_to_get_it(root: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        ModelStore(root).resolve("smollm2")
    assert "localllm pull smollm2" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"config":{}}',
        b'{"config":{"mediaType":"x","digest":"sha256:../../x","size":1},"layers":[]}',
        b'{"config":{"mediaType":"","digest":"","size":0},"layers":null}',
        b'{"config":{"mediaType":"","digest":"","size":0},"layers":[{"mediaType":"x","digest":"","size":1}]}',
        b'{"config":{"mediaType":"","digest":"","size":-1},"layers":[]}',
    ],
)
def test_a_broken_manifest_does_not_break_the_list(root: Path, gguf: bytes, data: bytes) -> None:
    put_model(root, "good", gguf)
    put_model(root, "bad", gguf).write_bytes(data)
    store = ModelStore(root)
    assert [model.name.display for model in store.list()] == ["good:latest"]
    with pytest.raises(StoreError):
        store.resolve("bad")


def test_a_name_too_long_for_the_disk_is_not_found(root: Path, gguf: bytes) -> None:
    put_model(root, "m", gguf)
    store, name = ModelStore(root), "h" * 300 + "/ns/m"
    for action in (store.resolve, store.remove):
        with pytest.raises(ModelNotFound):
            action(name)
    with pytest.raises(ModelNotFound):
        store.copy(name, "x")
    with pytest.raises(StoreError):
        store.copy("m", name)
    assert [model.name.display for model in store.list()] == ["m:latest"]


def test_a_store_that_cannot_be_read_does_not_look_empty(root: Path) -> None:
    root.mkdir()
    (root / "manifests").write_text("in the way")
    store = ModelStore(root)
    with pytest.raises(StoreError) as caught:
        store.list()
    assert "LOCALLLM_MODELS" in caught.value.hint
    with pytest.raises(StoreError):
        store.resolve("m")


def test_a_broken_model_file_is_listed_and_refused_when_it_is_needed(root: Path) -> None:
    put_model(root, "broken", b"GGUF but not really, and long enough to be a header")
    store = ModelStore(root)
    assert [model.name.display for model in store.list()] == ["broken:latest"]
    with pytest.raises(InvalidModelFile):
        _ = store.resolve("broken").header


def test_a_changed_manifest_is_read_again(root: Path, gguf: bytes) -> None:
    put_model(root, "m", gguf, system=b"old")
    store = ModelStore(root)
    assert store.resolve("m").system == "old"
    put_model(root, "m", gguf, system=b"new")
    assert store.resolve("m").system == "new"


def test_removing_frees_only_what_nobody_else_needs(root: Path, gguf: bytes) -> None:
    put_model(root, "a", gguf, system=b"only a")
    put_model(root, "b", gguf)
    store = ModelStore(root)
    removed = store.remove("a")
    assert removed.freed_bytes == len(b"only a")
    digest = hashlib.sha256(gguf).hexdigest()
    assert removed.shared_with[digest] == ["b:latest"]
    assert store.resolve("b").model_path.exists()
    store.remove("b")
    assert list((root / "blobs").glob("sha256-*")) == []
    assert not (root / "manifests" / "registry.ollama.ai").exists()


def test_removing_deletes_no_blob_while_a_manifest_cannot_be_read(root: Path, gguf: bytes) -> None:
    put_model(root, "a", gguf)
    put_model(root, "b", gguf).write_bytes(b"{")
    assert ModelStore(root).remove("a").freed_bytes == 0
    assert (root / "blobs" / f"sha256-{hashlib.sha256(gguf).hexdigest()}").exists()


def test_a_model_without_files_does_not_keep_others_from_being_removed(root: Path, gguf: bytes) -> None:
    put_model(root, "cloud", gguf).write_bytes(b'{"config":{"mediaType":"","digest":"","size":0},"layers":null}')
    put_model(root, "m", gguf, system=b"mine")
    assert ModelStore(root).remove("m").freed_bytes > len(gguf)


def test_a_copy_shares_everything_and_survives_the_original(root: Path, gguf: bytes) -> None:
    put_model(root, "a", gguf)
    store = ModelStore(root)
    store.copy("a", "me/b:v1")
    store.remove("a")
    assert store.resolve("me/b:v1").model_path.read_bytes() == gguf
    with pytest.raises(ModelNotFound):
        store.copy("a", "c")


def test_publishing_again_drops_the_blobs_of_the_predecessor(root: Path, gguf: bytes) -> None:
    put_model(root, "m", gguf, system=b"old")
    newer = put_model(root, "other", gguf, system=b"new").read_bytes()
    store = ModelStore(root)
    store.publish(ModelName.parse("m"), newer)
    assert not (root / "blobs" / f"sha256-{hashlib.sha256(b'old').hexdigest()}").exists()
    assert store.resolve("m").system == "new"


def test_a_manifest_is_not_published_without_its_blobs(root: Path, gguf: bytes) -> None:
    data = put_model(root, "m", gguf).read_bytes()
    store = ModelStore(root)
    store.remove("m")
    with pytest.raises(StoreError):
        store.publish(ModelName.parse("m"), data)
    assert ManifestStore(root).find(ModelName.parse("m")) is None


@pytest.mark.parametrize("digest", ["sha256:../../x", "a" * 63, "a" * 65, "A" * 64, "md5:" + "a" * 64, ""])
def test_no_path_is_made_of_a_bad_digest(root: Path, digest: str) -> None:
    with pytest.raises(InvalidRequest):
        blobs.BlobStore(root).path(digest)


def test_a_local_file_is_linked_and_left_alone(root: Path, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "mine.gguf")
    before = source.read_bytes()
    store = blobs.BlobStore(root)
    digest, size = store.add_file(source)
    stored = store.path(digest)
    assert (size, stored.read_bytes()) == (len(before), before)
    shares_file = stored.stat().st_ino == source.stat().st_ino
    assert shares_file or stored.stat().st_blocks <= source.stat().st_blocks
    assert store.remove(digest) == (0 if shares_file else size)
    assert source.read_bytes() == before


def test_a_file_that_changes_while_it_is_taken_in_is_refused(root: Path, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "mine.gguf")
    store = blobs.BlobStore(root)

    def write_on(_done: int) -> None:
        with source.open("ab") as file:
            file.write(b"more")

    with pytest.raises(InvalidRequest) as caught:
        store.add_file(source, write_on)
    assert "changed while it was read" in caught.value.message
    assert list((root / "blobs").iterdir()) == []


def test_only_files_are_taken_in(root: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(InvalidRequest):
            blobs.BlobStore(root).add_file(path)
    assert not root.exists()


def test_a_file_is_copied_where_it_can_be_neither_cloned_nor_linked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(blobs, "_reflink", lambda _source, _target: False)
    monkeypatch.setattr("os.link", refuse)
    source = write_gguf(tmp_path / "mine.gguf")
    store = blobs.BlobStore(root)
    digest, size = store.add_file(source)
    assert store.path(digest).read_bytes() == source.read_bytes()
    assert store.remove(digest) == size

    usage = shutil.disk_usage(tmp_path)._replace(free=size - 7)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(NoSpace) as caught:
        store.add_file(source)
    assert caught.value.details == {"needed_bytes": size, "missing_bytes": 7}
    assert list((root / "blobs").iterdir()) == []


def test_a_full_disk_is_said_so_and_leaves_nothing_behind(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs, "_link_or_copy", full)
    store = blobs.BlobStore(root)
    with pytest.raises(NoSpace):
        store.add_file(write_gguf(tmp_path / "mine.gguf"))
    assert list((root / "blobs").iterdir()) == []


def test_a_partial_is_no_blob(root: Path) -> None:
    store = blobs.BlobStore(root)
    digest = hashlib.sha256(b"data").hexdigest()
    partial = store.partial(digest)
    partial.write_bytes(b"data")
    assert not store.has(digest)
    store.commit(partial, digest)
    assert store.path(digest).read_bytes() == b"data"


def test_a_lock_keeps_others_out_until_it_is_released(root: Path) -> None:
    store = blobs.BlobStore(root)
    with store.lock("key"):
        assert blobs.BlobStore(root).try_lock("key") is None
    lock = blobs.BlobStore(root).try_lock("key")
    assert lock is not None
    lock.release()


_HOLD_A_LOCK = """
import sys
from pathlib import Path
from localllm.store.blobs import BlobStore
with BlobStore(Path(sys.argv[1])).lock("key"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_keeps_other_processes_out_and_ends_with_its_holder(root: Path) -> None:
    store = blobs.BlobStore(root)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_A_LOCK, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        assert store.try_lock("key") is None
        holder.kill()
        holder.wait()
        lock = store.try_lock("key")
        assert lock is not None
        lock.release()


def test_a_lock_that_is_never_free_is_given_up_with_a_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "LOCK_SECONDS", 0.05)
    store = blobs.BlobStore(root)
    with store.lock("key"), pytest.raises(LocalLLMError) as caught, store.lock("key"):
        pass
    assert "another process has been using key" in caught.value.message


def test_model_layer_type_is_ollamas() -> None:
    assert MODEL_LAYER == "application/vnd.ollama.image.model"
