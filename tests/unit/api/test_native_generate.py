"""/api/generate, as a client on a socket sees it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.api.harness import Daemon

from localllm.daemon.supervisor import Granted
from localllm.errors import ContextExceeded
from localllm.types import Delta, Finished, Message, Usage

WITH_TOKENS = Finished("stop", Usage(3, 0, 2), tokens=(1, 2, 3, 4, 5))


async def test_a_stream_has_responses_and_ends_with_the_context(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("Hel"), Delta("lo"), WITH_TOKENS)
    first, second, last = await daemon.lines("/api/generate", model="tiny", prompt="Hi")
    del first["created_at"]
    assert first == {"model": "tiny", "response": "Hel", "done": False}
    assert second["response"] == "lo"
    assert (last["response"], last["done"], last["done_reason"]) == ("", True, "stop")
    assert (last["context"], last["prompt_eval_count"]) == ([1, 2, 3, 4, 5], 3)
    assert "eval_duration" not in last, "a metric of zero is left out"
    assert "prompt_cached_count" not in last


async def test_without_streaming_the_answer_is_one_object(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta(thinking="hm"), Delta("Hel"), Delta("lo"), WITH_TOKENS)
    reply = (await daemon.post("/api/generate", model="thinker", prompt="Hi", stream=False)).json()
    assert (reply["response"], reply["thinking"], reply["done"]) == ("Hello", "hm", True)


async def test_a_prompt_is_a_chat_with_one_user_message(daemon: Daemon) -> None:
    daemon.models.add("butler", system="Be brief.", messages=[("user", "Q"), ("assistant", "A")])
    await daemon.post("/api/generate", model="butler", prompt="Hi")
    request = daemon.supervisor.request
    assert request.messages == (
        Message("system", "Be brief."),
        Message("user", "Q"),
        Message("assistant", "A"),
        Message("user", "Hi"),
    )
    assert (request.prompt, request.return_tokens, request.truncate) == (None, True, True)


async def test_a_context_goes_on_from_an_earlier_exchange(daemon: Daemon) -> None:
    daemon.models.add("butler", system="Be brief.", messages=[("user", "Q"), ("assistant", "A")])
    await daemon.post("/api/generate", model="butler", prompt="Hi", system="Be long.", context=[7, 8])
    request = daemon.supervisor.request
    assert request.messages == (Message("system", "Be long."), Message("user", "Hi"))
    assert request.context_tokens == (7, 8)


async def test_a_raw_prompt_is_sent_as_it_is(daemon: Daemon) -> None:
    daemon.models.add("butler", system="Be brief.")
    (*_, last) = await daemon.lines("/api/generate", model="butler", prompt="<x>Hi", raw=True)
    request = daemon.supervisor.request
    assert (request.messages, request.prompt, request.return_tokens) == (None, "<x>Hi", False)
    assert "context" not in last


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 404, "model '' not found"),
        ({"model": "nobody", "prompt": "x"}, 404, "model 'nobody' not found"),
        ({"model": "../x", "prompt": "x"}, 400, "invalid model name"),
        ({"model": "embedder", "prompt": "x"}, 400, '"embedder" does not support generate'),
        ({"model": "tiny", "prompt": "x", "template": "{{ .Prompt }}"}, 400, '"template" is not supported yet'),
        ({"model": "tiny", "prompt": "x", "images": ["aGk="]}, 400, '"images": images cannot be read'),
        ({"model": "tiny", "prompt": "x", "shift": "yes"}, 400, '"shift": expected bool, got str'),
        ({"model": "tiny", "prompt": "x", "context": "y"}, 400, '"context": expected array, got str'),
        *(
            (
                {"model": "tiny", "prompt": "x", "raw": True} | more,
                400,
                "raw mode does not support template, system, or context",
            )
            for more in ({"template": "t"}, {"system": "s"}, {"context": [1]})
        ),
        ({"model": "tiny", "prompt": "x", "options": {"stop": "s"}}, 500, 'option "stop" must be of type array'),
    ],
)
async def test_mistakes_are_answered_in_ollamas_words(
    daemon: Daemon, body: dict[str, Any], status: int, error: str
) -> None:
    response = await daemon.post("/api/generate", **body)
    assert (response.status_code, response.json()["error"]) == (status, error)
    assert daemon.supervisor.calls == []


@pytest.mark.parametrize("empty", [{"images": [], "suffix": "", "template": None, "shift": False, "logprobs": False}])
async def test_fields_that_ask_for_nothing_are_no_mistake(daemon: Daemon, empty: dict[str, Any]) -> None:
    assert (await daemon.post("/api/generate", model="tiny", prompt="x", **empty)).status_code == 200


async def test_a_window_is_shifted_only_when_asked(daemon: Daemon) -> None:
    await daemon.post("/api/generate", model="tiny", prompt="x")
    assert not daemon.supervisor.request.shift
    usage = Usage(num_prompt_tokens=9, num_output_tokens=300, num_dropped_tokens=124)
    daemon.supervisor.script = (Finished("length", usage),)
    response = await daemon.post("/api/generate", model="tiny", prompt="x", shift=True, options={"num_keep": -1})
    last = response.json()
    request = daemon.supervisor.request
    assert (request.shift, request.sampling.num_keep) == (True, -1)
    assert (last["truncated"], last["dropped_token_count"]) == (True, 124)


async def test_a_suffix_reaches_the_runner_without_a_chat_around_it(daemon: Daemon) -> None:
    await daemon.post("/api/generate", model="tiny", prompt="x", suffix="y")
    request = daemon.supervisor.request
    assert (request.prompt, request.suffix, request.messages) == ("x", "y", None)


async def test_a_prompt_that_is_too_long_tells_both_numbers(daemon: Daemon) -> None:
    daemon.supervisor.script = (ContextExceeded("it has 300 tokens and the window holds 256", num_ctx=256),)
    response = await daemon.post("/api/generate", model="tiny", prompt="x")
    assert response.status_code == 400
    assert response.json() == {
        "error": "it has 300 tokens and the window holds 256",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("keep_alive", "reason"), [({}, "load"), ({"keep_alive": 5}, "load"), ({"keep_alive": "0"}, "unload")]
)
async def test_an_empty_prompt_loads_or_unloads(
    daemon: Daemon, stream: bool, keep_alive: dict[str, Any], reason: str
) -> None:
    response = await daemon.post("/api/generate", model="tiny", stream=stream, **keep_alive)
    reply = response.json()
    del reply["created_at"]
    assert reply == {"model": "tiny", "response": "", "done": True, "done_reason": reason}
    assert daemon.supervisor.calls == []
    assert (len(daemon.supervisor.loads), len(daemon.supervisor.unloads)) == ((1, 0) if reason == "load" else (0, 1))
