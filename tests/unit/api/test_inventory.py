"""Models listed, shown, loaded, pulled, copied and deleted over /api."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from starlette.datastructures import Address as StarletteAddress
from starlette.requests import Request
from tests.unit.api.harness import Daemon, parse_time

import localllm
from localllm.api.inventory import OLLAMA_VERSION
from localllm.daemon.supervisor import ResidentModel
from localllm.errors import InvalidName, LocalLLMError, NotFoundAtSource, SourceUnavailable
from localllm.store.library import ModelStore
from localllm.store.pull import PullEvent
from localllm.types import LoadOptions, RunnerInfo


async def test_small_routes_and_their_head_forms(daemon: Daemon) -> None:
    version = f'{{"version":"{OLLAMA_VERSION}","localllm":"{localllm.__version__}"}}'
    for path, text in (("/", "Ollama is running"), ("/api/version", version)):
        assert (await daemon.client.get(path)).text == text
        head = await daemon.client.head(path)
        assert (head.status_code, head.text, head.headers["content-length"]) == (200, "", str(len(text)))
    assert (await daemon.client.head("/api/tags")).status_code == 200


async def test_health_tells_this_daemon_from_others(daemon: Daemon) -> None:
    reply = (await daemon.client.get("/health")).json()
    assert reply == {"status": "ok", "server": "localllm", "version": localllm.__version__, "pid": os.getpid()}


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/nothing", 404, "404 page not found"),
        ("POST", "/api/embedded", 404, "404 page not found"),
        ("GET", "/api/chat", 405, "405 method not allowed"),
        ("POST", "/api/delete", 405, "405 method not allowed"),
    ],
)
async def test_other_routes(daemon: Daemon, method: str, path: str, status: int, text: str) -> None:
    response = await daemon.client.request(method, path)
    assert (response.status_code, response.text) == (status, text)
    assert response.headers["content-type"].startswith("text/plain")


# ---- tags, show, ps ----


async def test_tags_lists_the_newest_first(daemon: Daemon) -> None:
    model = daemon.models.add("user/New:v1")
    os.utime(daemon.models.store.manifests.path(model.name), (4e9, 4e9))
    models = (await daemon.client.get("/api/tags")).json()["models"]
    assert {m["name"] for m in models[1:]} == {
        f"{n}:latest" for n in ("tiny", "thinker", "tooler", "embedder", "ranker")
    }
    newest = models[0]
    assert parse_time(newest.pop("modified_at")).timestamp() == 4e9
    assert newest == {
        "name": "user/New:v1",
        "model": "user/New:v1",
        "size": model.size,
        "digest": model.digest,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "1M",
            "quantization_level": "F32",
            "context_length": 2048,
            "embedding_length": 64,
        },
        "capabilities": ["completion"],
    }
    assert len(model.digest) == 64


async def test_a_damaged_model_does_not_spoil_the_list(daemon: Daemon) -> None:
    model = daemon.models.add("broken", template="{{ broken }}")
    model.model_path.write_bytes(b"not a model at all, and long enough to be one")
    models = {m["name"]: m for m in (await daemon.client.get("/api/tags")).json()["models"]}
    assert models["broken:latest"]["details"]["family"] == "llama"
    assert "capabilities" not in models["broken:latest"]
    response = await daemon.post("/api/chat", model="broken", messages=[{"role": "user", "content": "x"}])
    assert (response.status_code, response.json()["code"]) == (422, "invalid_model_file")


async def test_an_empty_store_is_an_empty_list(daemon: Daemon) -> None:
    for model in daemon.models.store.list():
        daemon.models.store.remove(model.name.full)
    assert (await daemon.client.get("/api/tags")).json() == {"models": []}
    assert (await daemon.client.get("/api/ps")).json() == {"models": []}


async def test_show_tells_everything(daemon: Daemon) -> None:
    model = daemon.models.add(
        "butler",
        template="{{ messages }}{{ tools }}",
        system='Say "yes".\nAlways.',
        parameters={"temperature": 0.5, "stop": ["<|end|>", " x"], "num_ctx": 512},
        messages=[("user", "Q"), ("assistant", "A")],
        license="Do what you like.",
    )
    reply = (await daemon.post("/api/show", model="butler")).json()
    assert reply["capabilities"] == ["completion", "tools"]
    assert reply["template"] == "{{ messages }}{{ tools }}"
    assert reply["license"] == "Do what you like."
    assert reply["messages"] == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert reply["details"]["quantization_level"] == "F32"
    assert reply["tensors"] == [{"name": "token_embd.weight", "type": "F32", "shape": [64, 3]}]
    assert reply["parameters"].splitlines() == [
        "num_ctx                        512",
        'stop                           "<|end|>"',
        'stop                           " x"',
        "temperature                    0.5",
    ]
    assert reply["modelfile"].splitlines()[4:] == [
        f"FROM {model.model_path}",
        'SYSTEM """Say "yes".',
        'Always."""',
        "PARAMETER num_ctx 512",
        "PARAMETER stop <|end|>",
        'PARAMETER stop " x"',
        "PARAMETER temperature 0.5",
        "LICENSE Do what you like.",
        "MESSAGE user Q",
        "MESSAGE assistant A",
    ]


async def test_show_gives_long_arrays_only_when_asked(daemon: Daemon) -> None:
    info = (await daemon.post("/api/show", name="tiny")).json()["model_info"]
    assert info["general.architecture"] == "llama"
    assert info["general.parameter_count"] == 192
    assert info["llama.context_length"] == 2048
    assert info["tokenizer.ggml.tokens"] is None
    assert "general.name" not in info
    assert "tokenizer.chat_template" not in info
    info = (await daemon.post("/api/show", name="tiny", verbose=True)).json()["model_info"]
    assert info["tokenizer.ggml.tokens"] == ["a", "b", "c"]


async def test_show_leaves_out_what_is_not_there(daemon: Daemon) -> None:
    reply = (await daemon.post("/api/show", model="tiny")).json()
    assert reply.keys() == {
        *{"modelfile", "template", "details", "model_info", "tensors", "capabilities", "modified_at"},
    }


async def test_show_to_an_editor_that_wants_its_own_words_back(daemon: Daemon) -> None:
    response = await daemon.client.post(
        "/api/show", json={"model": "tiny"}, headers={"User-Agent": "GitHubCopilotChat/1.0"}
    )
    assert response.json()["model_info"]["general.basename"] == "tiny"


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 400, "model is required"),
        ({"model": "nobody"}, 404, "model 'nobody:latest' not found"),
        ({"model": "a//b"}, 400, "invalid model name"),
    ],
)
async def test_show_mistakes(daemon: Daemon, body: dict[str, Any], status: int, error: str) -> None:
    response = await daemon.post("/api/show", **body)
    assert (response.status_code, response.json()["error"]) == (status, error)


def resident(daemon: Daemon, name: str, **changes: Any) -> ResidentModel:
    fields: dict[str, Any] = {
        "model": daemon.models.store.resolve(name),
        "state": "ready",
        "info": RunnerInfo(4, 2048, 8192, 2, 2, num_gpu_layers=1, num_layers=2, size_bytes=1000, size_vram_bytes=500),
        "options": LoadOptions(num_ctx=4096, num_parallel=8, num_threads=2, num_threads_batch=3),
        "num_in_flight": 1,
        "num_queued": 2,
        "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5),
        "pid": 99,
        "size_bytes": 3000,
        "fraction": 1.0,
        "reason": "it was asked for",
    }
    return ResidentModel(**fields | changes)


async def test_ps_tells_what_is_loaded_and_how(daemon: Daemon) -> None:
    soon = resident(daemon, "tiny", step_age=0.25)
    forever = resident(daemon, "tooler", expires_at=None, state="loading", info=None, fraction=0.25, pid=None)
    daemon.supervisor.residents = [soon, forever]
    first, second = (await daemon.client.get("/api/ps")).json()["models"]

    assert (first["name"], first["runner"]["state"], first["runner"]["load_fraction"]) == (
        "tooler:latest",
        "loading",
        0.25,
    )
    assert parse_time(first["expires_at"]).year > 2300
    assert (first["size"], first["size_vram"], first["context_length"]) == (3000, 0, 4096)
    expires_at = parse_time(second.pop("expires_at"))
    assert expires_at == soon.expires_at
    assert second == {
        "name": "tiny:latest",
        "model": "tiny:latest",
        "size": 3000,
        "digest": soon.model.digest,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "1M",
            "quantization_level": "F32",
        },
        "size_vram": 1500,
        "context_length": 2048,
        "runner": {
            "state": "ready",
            "pid": 99,
            "num_slots": 4,
            "num_in_flight": 1,
            "num_queued": 2,
            "num_threads": 2,
            "num_threads_batch": 3,
            "num_gpu_layers": 1,
            "kv_cache_type": "f16",
            "speculates": True,
            "is_pinned": False,
            "loaded_because": "it was asked for",
            "step_age": 0.25,
        },
    }


# ---- delete, copy ----


async def test_delete_of_a_second_name_leaves_the_first_one_loaded(daemon: Daemon) -> None:
    await daemon.post("/api/copy", source="tiny", destination="copy")
    assert (await daemon.client.request("DELETE", "/api/delete", json={"name": "copy"})).status_code == 200
    assert daemon.supervisor.unloads == []


async def test_delete_unloads_and_forgets(daemon: Daemon) -> None:
    model = daemon.models.store.resolve("tiny")
    response = await daemon.client.request("DELETE", "/api/delete", json={"name": "TINY"})
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["x-freed-bytes"]) > 0
    assert daemon.supervisor.unloads == ["tiny:latest"]
    assert not model.model_path.exists()


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("nobody", 404, "model 'nobody' not found"),
        ("a//b", 400, 'name "a//b" is invalid'),
        ("", 400, 'name "" is invalid'),
    ],
)
async def test_delete_mistakes(daemon: Daemon, name: str, status: int, error: str) -> None:
    response = await daemon.client.request("DELETE", "/api/delete", json={"model": name})
    assert (response.status_code, response.json()["error"]) == (status, error)


async def test_copy_gives_a_second_name(daemon: Daemon) -> None:
    response = await daemon.post("/api/copy", source="tiny", destination="me/copy:v2")
    assert (response.status_code, response.content) == (200, b"")
    assert daemon.models.store.resolve("me/copy:v2").digest == daemon.models.store.resolve("tiny").digest


@pytest.mark.parametrize(
    ("source", "destination", "status", "error"),
    [
        ("nobody", "x", 404, 'model "nobody" not found'),
        ("a//b", "x", 400, 'source "a//b" is invalid'),
        ("tiny", "a//b", 400, 'destination "a//b" is invalid'),
    ],
)
async def test_copy_mistakes(daemon: Daemon, source: str, destination: str, status: int, error: str) -> None:
    response = await daemon.post("/api/copy", source=source, destination=destination)
    assert (response.status_code, response.json()["error"]) == (status, error)


# ---- pull ----


class Puller:
    """Stands in for ModelStore.pull: yields its events and then fails, if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = [
            PullEvent("pulling manifest"),
            PullEvent("pulling 0123456789ab", "sha256:01", 10, 5),
            PullEvent("success"),
        ]
        self.error: LocalLLMError | None = None
        self.asked: list[tuple[str, bool]] = []
        monkeypatch.setattr(ModelStore, "pull", lambda _, text, *, insecure=False: self.pull(text, insecure))

    async def pull(self, text: str, insecure: bool) -> AsyncGenerator[PullEvent, None]:
        self.asked.append((text, insecure))
        for event in self.events:
            yield event
        if self.error is not None:
            raise self.error


@pytest.fixture
def puller(monkeypatch: pytest.MonkeyPatch) -> Puller:
    return Puller(monkeypatch)


async def test_pull_streams_what_the_store_tells(daemon: Daemon, puller: Puller) -> None:
    assert await daemon.lines("/api/pull", model="hf.co/a/b", insecure=True) == [
        {"status": "pulling manifest"},
        {"status": "pulling 0123456789ab", "digest": "sha256:01", "total": 10, "completed": 5},
        {"status": "success"},
    ]
    assert puller.asked == [("hf.co/a/b", True)]


async def test_pull_without_streaming_tells_the_end(daemon: Daemon, puller: Puller) -> None:
    response = await daemon.post("/api/pull", name="tiny", stream=False)
    assert (response.status_code, response.json()) == (200, {"status": "success"})


@pytest.mark.parametrize("events", [[], [PullEvent("pulling manifest")]])
async def test_pull_of_nothing_known_fails_inside_the_stream(
    daemon: Daemon, puller: Puller, events: list[PullEvent]
) -> None:
    puller.events = events
    puller.error = NotFoundAtSource("no model nobody is known", hint="Did you mean tiny?")
    (*_, last) = await daemon.lines("/api/pull", model="nobody")
    assert last == {
        "error": "pull model manifest: file does not exist: no model nobody is known",
        "code": "not_found_at_source",
        "hint": "Did you mean tiny?",
    }
    response = await daemon.post("/api/pull", model="nobody", stream=False)
    assert (response.status_code, response.json()) == (404, last)


async def test_pull_that_breaks_off_says_why(daemon: Daemon, puller: Puller) -> None:
    puller.events = puller.events[:2]
    puller.error = SourceUnavailable("the hub is gone")
    lines = await daemon.lines("/api/pull", model="tiny")
    assert lines[-1] == {"error": "the hub is gone", "code": "source_unavailable"}
    assert (await daemon.post("/api/pull", model="tiny", stream=False)).status_code == 502


@pytest.mark.parametrize("name", ["", "a//b"])
@pytest.mark.parametrize("stream", [True, False])
async def test_pull_of_a_bad_name(daemon: Daemon, puller: Puller, name: str, stream: bool) -> None:
    puller.events, puller.error = [], InvalidName("it has an empty part")
    response = await daemon.post("/api/pull", model=name, stream=stream)
    assert (response.status_code, response.json()["error"]) == (400, "invalid model name")


async def test_pull_of_a_file_is_for_clients_on_this_machine(
    daemon: Daemon, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(await daemon.lines("/api/pull", model="/models/a.gguf")) == 3
    monkeypatch.setattr(Request, "client", StarletteAddress("192.168.1.7", 5))
    for name in ("/models/a.gguf", "../a.gguf", "~/a.gguf"):
        assert (await daemon.post("/api/pull", model=name)).status_code == 403
    assert (await daemon.post("/api/pull", model="tiny")).status_code == 200
    assert [text for text, _ in puller.asked] == ["/models/a.gguf", "tiny"]


async def test_show_tells_about_a_projector(daemon: Daemon) -> None:
    daemon.models.add("seeing", projector=True)
    reply = (await daemon.post("/api/show", model="seeing")).json()
    assert reply["projector_info"]["general.architecture"] == "clip"
    assert reply["capabilities"] == ["completion", "vision"]


async def test_metrics_are_a_page_for_prometheus(daemon: Daemon) -> None:
    daemon.supervisor.residents = [resident(daemon, "tiny")]
    response = await daemon.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'localllm_queued_requests{model="tiny:latest"} 2.0' in response.text
