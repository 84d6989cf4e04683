"""What those who wait are told, and how long they want to wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.api.harness import DONE, Daemon

from localllm.api import streaming
from localllm.daemon.supervisor import Granted, Standing
from localllm.errors import RunnerCrashed
from localllm.types import Delta, Finished

HELLO = [{"role": "user", "content": "hello"}]
QUEUED = Standing("x.1", "tiny:latest", "queued", 2, 1.0, 4.04)
LOADING = Standing("x.2", "tiny:latest", "loading", 1, 0.45, 0.0)
READING = Standing("x.3", "tiny:latest", "running", 0, 1.0, 0.0, (300, 1200))


async def test_the_queue_shows_where_everybody_stands(daemon: Daemon) -> None:
    daemon.supervisor.standing = [QUEUED, READING]
    queued = {"id": "x.1", "model": "tiny:latest", "state": "queued", "position": 2}
    reading = {"id": "x.3", "model": "tiny:latest", "state": "running", "position": 0}
    assert (await daemon.client.get("/api/queue")).json()["requests"] == [
        queued | {"load_fraction": 1.0, "eta_seconds": 4.0},
        reading
        | {
            "load_fraction": 1.0,
            "eta_seconds": 0.0,
            "prefill": {"num_computed_tokens": 300, "num_prompt_tokens": 1200},
        },
    ]


async def test_ready_is_not_the_same_as_alive(daemon: Daemon) -> None:
    assert (await daemon.client.get("/ready")).json() == {"status": "ready"}
    daemon.supervisor.is_draining = True
    response = await daemon.client.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert (await daemon.client.get("/health")).status_code == 200


async def read_while_waiting(daemon: Daemon, path: str, standing: Standing, end: Any, **body: Any) -> str:
    """The stream of a request that waits for a while, until its first comment is there, and ends then."""
    go_on = asyncio.Event()
    daemon.supervisor.script = (go_on, Granted(1, 1), Delta("hi"), end)
    response = asyncio.create_task(daemon.post(path, model="tiny", stream=True, **body))
    await daemon.supervisor.has_begun.wait()
    request = daemon.supervisor.calls[-1].request
    assert request is not None
    daemon.supervisor.standing = [Standing(request.id, *list(vars(standing).values())[1:])]
    await asyncio.sleep(0.1)
    go_on.set()
    return (await response).text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
    ],
)
@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (QUEUED, ": queued position=2 eta=4s"),
        (LOADING, ": loading 45% position=1 eta=0s"),
        (READING, ": reading the prompt 300/1200"),
    ],
)
async def test_a_stream_is_kept_alive_with_words_on_where_it_stands(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, standing: Standing, words: str
) -> None:
    monkeypatch.setattr(streaming, "BEAT_SECONDS", 0.02)
    text = await read_while_waiting(daemon, path, standing, DONE, **body)
    assert text.startswith(": ") and f"{words}\n\n" in text
    assert "event: ping" in text if path == "/v1/messages" else "hi" in text


async def test_an_error_after_a_comment_is_an_event(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BEAT_SECONDS", 0.02)
    text = await read_while_waiting(daemon, "/v1/chat/completions", QUEUED, RunnerCrashed("it died"), messages=HELLO)
    assert text.startswith(": ") and '"code":"runner_crashed"' in text


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_comes_too_late_is_not_waited_for(daemon: Daemon, stream: bool) -> None:
    daemon.supervisor.script = (asyncio.Event(),)
    response = await daemon.client.post(
        "/api/chat", json={"model": "tiny", "messages": HELLO, "stream": stream}, headers={"X-Deadline-Ms": "50"}
    )
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    await asyncio.wait_for(daemon.supervisor.was_cancelled.wait(), 5)


async def test_a_turn_that_cannot_come_in_time_is_refused_at_once(daemon: Daemon) -> None:
    daemon.supervisor.eta = 30.0
    response = await daemon.client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO}, headers={"X-Deadline-Ms": "5000"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert daemon.supervisor.calls == []
    assert (await daemon.post("/v1/chat/completions", model="tiny", messages=HELLO)).status_code == 200


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1.5", "99999999999"])
async def test_a_deadline_is_a_number_of_milliseconds(daemon: Daemon, value: str) -> None:
    response = await daemon.client.get("/api/tags", headers={"X-Deadline-Ms": value})
    assert response.status_code == 400 and "X-Deadline-Ms" in response.json()["error"]


async def test_tokens_and_text(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Finished("stop", tokens=(5, 6), prompt="hi"))
    reply = await daemon.post("/api/tokenize", model="tiny", text="hi")
    assert reply.json() == {"model": "tiny", "tokens": [5, 6]}
    request = daemon.supervisor.request
    assert (request.prompt, request.inspect, request.add_special) == ("hi", True, False)
    reply = await daemon.post("/api/detokenize", model="tiny", tokens=[5, 6])
    assert reply.json() == {"model": "tiny", "text": "hi"}
    assert daemon.supervisor.request.context_tokens == (5, 6)
    reply = await daemon.post("/api/render", model="tiny", messages=HELLO)
    assert reply.json() == {"model": "tiny", "prompt": "hi", "tokens": [5, 6], "num_tokens": 2}
    for path in ("/api/tokenize", "/api/detokenize", "/api/render"):
        assert (await daemon.post(path)).status_code == 400
