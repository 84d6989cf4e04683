"""What a request says about its turn, and what its answer says about the work that it took."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.api.harness import Daemon

from localllm.daemon.supervisor import Granted
from localllm.types import Delta, Finished, Timings, Usage

HELLO: dict[str, Any] = {"model": "tiny", "stream": False, "messages": [{"role": "user", "content": "hello"}]}
TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", HELLO),
    ("/api/generate", {"model": "tiny", "stream": False, "prompt": "hello"}),
    ("/api/render", HELLO),
    ("/api/tokenize", {"model": "tiny", "text": "hello"}),
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"model": "tiny", "prompt": "hello"}),
    ("/v1/responses", {"model": "tiny", "input": "hello"}),
    ("/v1/messages", HELLO | {"max_tokens": 5}),
    ("/v1/messages/count_tokens", HELLO),
]


@pytest.mark.parametrize(("path", "body"), TEXTS)
@pytest.mark.parametrize(
    ("more", "header", "priority"),
    [
        ({"priority": -3}, "7", -3),
        ({"options": {"priority": 4}}, "7", 4),
        ({}, "7", 7),
        ({"priority": 99}, "", 10),
        ({"priority": None}, "", 0),
    ],
)
async def test_urgency_can_be_told_on_every_route(
    daemon: Daemon, path: str, body: dict[str, Any], more: dict[str, Any], header: str, priority: int
) -> None:
    headers = {"X-Priority": header} if header else {}
    response = await daemon.client.post(path, json=body | more, headers=headers)
    assert response.status_code == 200, response.text
    assert daemon.supervisor.request.priority == priority
    assert not daemon.supervisor.request.pin


async def test_vectors_have_their_turn_too(daemon: Daemon) -> None:
    response = await daemon.client.post(
        "/api/embed", json={"model": "embedder", "input": "hello"}, headers={"X-Priority": "2"}
    )
    assert (response.status_code, daemon.supervisor.wish.priority) == (200, 2)


@pytest.mark.parametrize(("path", "body"), [text for text in TEXTS if text[0] != "/api/tokenize"])
@pytest.mark.parametrize("more", [{"pin": True}, {"options": {"pin": True}}])
async def test_a_prompt_can_be_pinned_on_every_route(
    daemon: Daemon, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    response = await daemon.client.post(path, json=body | more)
    assert response.status_code == 200, response.text
    assert daemon.supervisor.request.pin


@pytest.mark.parametrize(
    ("more", "header", "status", "named"),
    [
        ({}, "soon", 400, "X-Priority"),
        ({"priority": 1.5}, "", 400, "priority"),
        ({"options": {"priority": "high"}}, "", 500, "priority"),
        ({"options": {"pin": 1}}, "", 500, "pin"),
    ],
)
async def test_mistakes_are_named(daemon: Daemon, more: dict[str, Any], header: str, status: int, named: str) -> None:
    headers = {"X-Priority": header} if header else {}
    response = await daemon.client.post("/api/chat", json=HELLO | more, headers=headers)
    assert response.status_code == status
    assert named in response.json()["error"]


# ---- what it took ----

USAGE = Usage(num_prompt_tokens=7, num_cached_tokens=4, num_output_tokens=9, num_draft_tokens=6, num_accepted_tokens=5)
SCRIPT = (
    Granted(5, 6),
    Delta(thinking="Hm.", num_tokens=3),
    Delta("Yes", num_tokens=6),
    Finished("stop", USAGE, Timings(1, 2, 3)),
)


async def test_ollamas_counts(daemon: Daemon) -> None:
    daemon.supervisor.script = SCRIPT
    reply = (await daemon.post("/api/chat", **HELLO | {"model": "thinker"})).json()
    names = ("prompt_eval_count", "prompt_cached_count", "eval_count", "draft_count", "draft_accepted_count")
    assert [reply[name] for name in names] == [7, 4, 9, 6, 5]


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_counts(daemon: Daemon, stream: bool) -> None:
    daemon.supervisor.script = SCRIPT
    body = HELLO | {"model": "thinker", "stream": stream, "stream_options": {"include_usage": True}}
    if stream:
        usage = (await daemon.events("/v1/chat/completions", **body))[-2]["usage"]
    else:
        usage = (await daemon.post("/v1/chat/completions", **body)).json()["usage"]
    assert usage == {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 3,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 1,
        },
    }


async def test_the_counts_of_responses_and_messages(daemon: Daemon) -> None:
    daemon.supervisor.script = SCRIPT
    usage = (await daemon.post("/v1/responses", model="thinker", input="hello")).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"]["reasoning_tokens"] == 3
    usage = (await daemon.post("/v1/messages", **HELLO | {"max_tokens": 9})).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 4, 9)


async def test_openais_prediction_is_taken(daemon: Daemon) -> None:
    body = HELLO | {"prediction": {"type": "content", "content": "hello"}}
    assert (await daemon.post("/v1/chat/completions", **body)).status_code == 200
