"""Log-probabilities and several answers at once, as clients on a socket see them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.api.harness import DONE, NOTHING_GUESSED, Daemon

from localllm.api import logprobs
from localllm.daemon.supervisor import Granted
from localllm.errors import ContextExceeded
from localllm.types import Delta, TokenLogprob, ToolCall

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
# A party popper in two tokens.
FIRST = TokenLogprob(b"\xf0\x9f", -0.5, (TokenLogprob(b"\xf0\x9f", -0.5), TokenLogprob(b"a", -1.5)))
SECOND = TokenLogprob(b"\x8e\x89", -0.25, (TokenLogprob(b"\x8e\x89", -0.25),))
DELTA = Delta("\N{PARTY POPPER}", num_tokens=2, logprobs=(FIRST, SECOND))
ENTRIES = [
    {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xF0, 0x9F],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0, 0x9F]},
            {"token": "a", "logprob": -1.5, "bytes": [97]},
        ],
    },
    {
        "token": "\ufffd\ufffd",
        "logprob": -0.25,
        "bytes": [0x8E, 0x89],
        "top_logprobs": [{"token": "\ufffd\ufffd", "logprob": -0.25, "bytes": [0x8E, 0x89]}],
    },
]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_ollamas_shape(daemon: Daemon, path: str) -> None:
    daemon.supervisor.script = [Granted(5, 6), DELTA, DONE]
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "prompt": "hello", "logprobs": True, "top_logprobs": 2}
    assert (await daemon.post(path, **body, stream=False)).json()["logprobs"] == ENTRIES
    assert daemon.supervisor.request.num_top_logprobs == 2
    first, last = await daemon.lines(path, **body)
    assert first["logprobs"] == ENTRIES
    assert "logprobs" not in last


async def test_nobody_pays_for_logprobs_unasked(daemon: Daemon) -> None:
    await daemon.post("/api/chat", model="tiny", messages=HELLO, top_logprobs=2)
    assert daemon.supervisor.request.num_top_logprobs is None
    await daemon.post(CHAT, model="tiny", messages=HELLO)
    assert daemon.supervisor.request.num_top_logprobs is None


async def test_ollama_leaves_out_an_empty_top_list_and_openai_does_not(daemon: Daemon) -> None:
    entry = TokenLogprob(b"a", -1.0)
    daemon.supervisor.script = [Granted(5, 6), Delta("a", num_tokens=1, logprobs=(entry,)), DONE]
    shown = {"token": "a", "logprob": -1.0, "bytes": [97]}
    reply = (await daemon.post("/api/chat", model="tiny", messages=HELLO, logprobs=True, stream=False)).json()
    assert reply["logprobs"] == [shown]
    reply = (await daemon.post(CHAT, model="tiny", messages=HELLO, logprobs=True)).json()
    assert reply["choices"][0]["logprobs"] == {"content": [{**shown, "top_logprobs": []}], "refusal": None}


async def test_openais_shape(daemon: Daemon) -> None:
    daemon.supervisor.script = [Granted(5, 6), DELTA, DONE]
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    reply = (await daemon.post(CHAT, **body)).json()
    assert reply["choices"][0]["logprobs"] == {"content": ENTRIES, "refusal": None}
    first, last, _ = await daemon.events(CHAT, **body, stream=True)
    assert first["choices"][0]["logprobs"] == {"content": ENTRIES, "refusal": None}
    assert "logprobs" not in last["choices"][0]


@pytest.mark.parametrize(
    "delta",
    [
        Delta(num_tokens=2, logprobs=(FIRST, SECOND)),
        Delta("a", "b", (ToolCall("c", "f", {}),), num_tokens=2, logprobs=(FIRST, SECOND)),
        Delta(tool_calls=(ToolCall("c", "f", {}),), num_tokens=2, logprobs=(FIRST, SECOND)),
    ],
)
async def test_each_token_is_told_once_whatever_it_was_for(daemon: Daemon, delta: Delta) -> None:
    daemon.supervisor.script = [Granted(5, 6), delta, DONE]
    chunks = (await daemon.events(CHAT, model="tiny", messages=HELLO, logprobs=True, stream=True))[:-1]
    told = [chunk["choices"][0].get("logprobs", {}).get("content", []) for chunk in chunks]
    assert [entry for entries in told for entry in entries] == ENTRIES


def test_openais_older_shape() -> None:
    entries = (TokenLogprob(b"ab", -1.0, (TokenLogprob(b"ab", -1.0), TokenLogprob(b"c", -2.0))), TokenLogprob(b"d", -3))
    shown = logprobs.completion(entries, first_offset=10)
    assert (shown.tokens, shown.token_logprobs) == (["ab", "d"], [-1.0, -3.0])
    assert shown.top_logprobs == [{"ab": -1.0, "c": -2.0}, {}]
    assert shown.text_offset == [10, 12]


async def test_several_answers_come_in_one_reply(daemon: Daemon) -> None:
    reply = (await daemon.post(CHAT, model="tiny", messages=HELLO, n=3, seed=5)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Hello"}
    assert reply["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 6,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": NOTHING_GUESSED,
    }
    requests = [call.request for call in daemon.supervisor.calls if call.request is not None]
    assert [request.sampling.seed for request in requests] == [5, 6, 7]
    assert len({request.id for request in requests}) == 3


async def test_several_answers_are_streamed_side_by_side(daemon: Daemon) -> None:
    chunks = await daemon.events(
        CHAT, model="tiny", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    )
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"] for choice in mine] == [{"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1] if "usage" in chunk] == [4]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failure_is_that_of_all(daemon: Daemon, stream: bool) -> None:
    daemon.supervisor.script = [ContextExceeded("too long")]
    response = await daemon.post(CHAT, model="tiny", messages=HELLO, n=2, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "too long"


async def test_leaving_cancels_all_answers(daemon: Daemon) -> None:
    daemon.supervisor.script = [Granted(5, 6), Delta("Hel", num_tokens=1), asyncio.Event()]
    _, writer = await daemon.connect(CHAT, model="tiny", messages=HELLO, n=2, stream=True)
    await asyncio.wait_for(daemon.supervisor.has_begun.wait(), 10)
    writer.close()
    await asyncio.wait_for(daemon.supervisor.was_cancelled.wait(), 10)
    assert len(daemon.supervisor.calls) == 2
