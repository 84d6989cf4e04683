"""Ollama's own Python client, unmodified, against the real daemon and the real model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from tests.e2e.clients.conftest import MODEL, Served

pytestmark = pytest.mark.model

HELLO = [{"role": "user", "content": "Say hello."}]
SHORT: Any = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with ollama.Client(served.url) as client:
        yield client


def test_the_inventory(client: Any) -> None:
    (listed,) = [model for model in client.list().models if model.model == f"{MODEL}:latest"]
    assert listed.digest and listed.size and listed.details and listed.details.family == "llama"
    shown = client.show(MODEL)
    assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"
    assert "completion" in (shown.capabilities or [])


def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat(MODEL, HELLO, options=SHORT)
    assert whole.message.content and whole.done_reason in ("stop", "length")
    assert whole.eval_count and whole.eval_duration and whole.prompt_eval_count and whole.total_duration
    parts = list(client.chat(MODEL, HELLO, stream=True, options=SHORT))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    (running,) = client.ps().models
    assert running.model == f"{MODEL}:latest" and running.context_length == 1024


def test_generate_and_its_context(client: Any) -> None:
    first = client.generate(MODEL, "Say hello.", options=SHORT)
    assert first.response and first.context
    second = client.generate(MODEL, "Again.", context=first.context, options=SHORT)
    assert second.context and list(second.context[: len(first.context)]) == list(first.context)
    raw = client.generate(MODEL, "One, two, three,", raw=True, options=SHORT)
    assert raw.response.startswith(" four") and not raw.context


def test_an_answer_keeps_to_its_schema(client: Any) -> None:
    likes = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "likes": likes},
        "required": ["colour", "likes"],
        "additionalProperties": False,
    }
    reply = client.chat(MODEL, HELLO, format=schema, options={"temperature": 0, "num_predict": 200})
    value = json.loads(reply.message.content or "")
    assert value["colour"] in ("red", "blue") and len(value["likes"]) <= 2
    with pytest.raises(ollama.ResponseError, match=r"format\.not") as caught:
        client.chat(MODEL, HELLO, format={"not": {}})
    assert caught.value.status_code == 400


def test_loading_and_unloading(client: Any) -> None:
    assert client.generate(MODEL, "").done_reason == "load"
    assert client.chat(MODEL, [], keep_alive=0).done_reason == "unload"
    assert not client.ps().models


def test_copies_blobs_and_errors(client: Any, tmp_path: Path) -> None:
    client.copy(MODEL, "copied")
    assert "copied:latest" in [model.model for model in client.list().models]
    client.delete("copied")
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.delete("copied")
    assert caught.value.status_code == 404
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF here")
    assert client.create_blob(file) == f"sha256:{hashlib.sha256(b'GGUF here').hexdigest()}"
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(MODEL, HELLO, think=True)
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        client.chat(MODEL, HELLO, tools=[{"type": "function", "function": {"name": "f"}}])
