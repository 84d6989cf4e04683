"""/v1, as a client on a socket sees it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.unit.api.harness import DONE, NOTHING_GUESSED, Daemon

from localllm.daemon.supervisor import Granted
from localllm.errors import ContextExceeded, QueueFull, RunnerCrashed
from localllm.types import Delta, Grammar, Message, ToolCall

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": NOTHING_GUESSED,
}


async def test_a_whole_answer(daemon: Daemon) -> None:
    reply = (await daemon.post(PATH, model="tiny", messages=HELLO)).json()
    assert reply.pop("id").startswith("chatcmpl-")
    assert abs(reply.pop("created") - time.time()) < 60
    assert reply == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp_localllm",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
        "usage": USAGE,
    }


async def test_a_stream_says_the_role_first_and_the_usage_last(daemon: Daemon) -> None:
    *chunks, mark = await daemon.events(
        PATH, model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert mark == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        [],
    ]
    assert chunks[-1]["usage"] == USAGE
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_usage_is_not_streamed_unasked(daemon: Daemon) -> None:
    chunks = await daemon.events(PATH, model="tiny", messages=HELLO, stream=True)
    assert len(chunks) == 4
    assert "usage" not in chunks[-2]


async def test_an_empty_answer_still_has_a_role(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), DONE)
    first, last, _ = await daemon.events(PATH, model="tiny", messages=HELLO, stream=True)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}


async def test_tool_calls_have_an_index_each_and_text_for_arguments(daemon: Daemon) -> None:
    calls = (ToolCall("c1", "weather", {"city": "Rome"}), ToolCall("c2", "weather", {}))
    daemon.supervisor.script = (Granted(1, 1), Delta(tool_calls=calls[:1]), Delta(tool_calls=calls[1:]), DONE)
    body = {"model": "tooler", "messages": HELLO, "tools": [WEATHER]}
    expected = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]

    whole = (await daemon.post(PATH, **body)).json()["choices"][0]
    assert whole["message"] == {"role": "assistant", "content": "", "tool_calls": expected}
    assert whole["finish_reason"] == "tool_calls"

    *chunks, _ = await daemon.events(PATH, stream=True, **body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("tool_calls") for choice in choices] == [expected[:1], expected[1:], None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "tool_calls"]


async def test_thinking_and_text_come_in_chunks_of_their_own(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("yes", thinking="hm"), DONE)
    body = {"model": "thinker", "messages": HELLO}
    *chunks, _ = await daemon.events(PATH, stream=True, **body)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "reasoning": "hm"},
        {"content": "yes"},
        {},
    ]
    message = (await daemon.post(PATH, **body)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning": "hm"}


async def test_an_error_later_is_the_last_event(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("Hel"), RunnerCrashed("the runner died", hint="Again."))
    first, last = await daemon.events(PATH, model="tiny", messages=HELLO, stream=True)
    assert first["choices"][0]["delta"]["content"] == "Hel"
    assert last == {
        "error": {
            "message": "the runner died",
            "type": "api_error",
            "param": None,
            "code": "runner_crashed",
            "hint": "Again.",
        }
    }


async def test_a_prompt_over_the_window_is_never_shortened(daemon: Daemon) -> None:
    daemon.supervisor.script = (ContextExceeded("it has 300 tokens and the window holds 256"),)
    for stream in (True, False):
        response = await daemon.post(PATH, model="tiny", messages=HELLO, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "it has 300 tokens and the window holds 256",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
        assert not daemon.supervisor.request.truncate


async def test_overload_says_when_to_come_back(daemon: Daemon) -> None:
    daemon.supervisor.script = (QueueFull("server busy"),)
    response = await daemon.post(PATH, model="tiny", messages=HELLO)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "api_error"


async def test_openais_sampling_defaults_give_way_to_the_modelfiles(daemon: Daemon) -> None:
    daemon.models.add("tuned", parameters={"temperature": 0.1})
    await daemon.post(PATH, model="tiny", messages=HELLO)
    sampling = daemon.supervisor.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 40)
    await daemon.post(PATH, model="tuned", messages=HELLO)
    sampling = daemon.supervisor.request.sampling
    assert (sampling.temperature, sampling.top_p) == (0.1, 1.0)
    await daemon.post(PATH, model="tuned", messages=HELLO, temperature=0)
    assert daemon.supervisor.request.sampling.temperature == 0.0


async def test_options_by_openais_names_and_by_ours(daemon: Daemon) -> None:
    await daemon.post(
        PATH,
        model="tiny",
        messages=HELLO,
        seed=7,
        stop="x",
        frequency_penalty=0.5,
        presence_penalty=-1,
        max_tokens=9,
        max_completion_tokens=5,
        num_ctx=512,
        options={"top_k": 3, "num_ctx": 99},
        keep_alive="1h",
    )
    (call,) = daemon.supervisor.calls
    sampling = daemon.supervisor.request.sampling
    assert (sampling.seed, sampling.stop, sampling.num_predict, sampling.top_k) == (7, ("x",), 5, 3)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
    assert (call.wishes.num_ctx, call.keep_alive) == (512, 3600.0)


async def test_messages_in_all_their_forms(daemon: Daemon) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "reasoning": "ask", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "tool_calls": [call | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]
    await daemon.post(PATH, model="tiny", messages=history)
    arguments = {"city": "Rome"}
    assert daemon.supervisor.request.messages == (
        Message("system", "Be brief."),
        Message("user", "one\ntwo"),
        Message("assistant", thinking="ask", tool_calls=(ToolCall("c1", "weather", arguments),)),
        Message("tool", "sunny", tool_name="weather", tool_call_id="c1"),
        Message("assistant", tool_calls=(ToolCall("c2", "weather", arguments),)),
        Message("tool", "", tool_name="weather", tool_call_id="c2"),
    )


@pytest.mark.parametrize(
    ("wish", "think"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning": {"effort": "xhigh"}}, "max"),
        ({"think": False}, False),
    ],
)
async def test_effort_is_how_to_think(daemon: Daemon, wish: dict[str, Any], think: Any) -> None:
    await daemon.post(PATH, model="thinker", messages=HELLO, **wish)
    assert daemon.supervisor.request.think == think


async def test_no_tools_are_offered_when_none_may_be_chosen(daemon: Daemon) -> None:
    await daemon.post(PATH, model="tooler", messages=HELLO, tools=[WEATHER], tool_choice="none")
    assert not daemon.supervisor.request.tools
    await daemon.post(PATH, model="tooler", messages=HELLO, tools=[WEATHER], tool_choice="auto")
    assert daemon.supervisor.request.tools == (WEATHER,)


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"n": 0}, "n", '"n": must be between 1 and 128'),
        ({"n": 129}, "n", '"n": must be between 1 and 128'),
        ({"top_logprobs": 2}, "top_logprobs", '"top_logprobs": needs logprobs to be true'),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", '"top_logprobs": must be between 0 and 20'),
        ({"logit_bias": {"5": 101}}, "logit_bias", '"logit_bias": must have values between -100 and 100'),
        ({"logit_bias": {"x": 1}}, "logit_bias", 'option "logit_bias" must be an object of numbers by token id'),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            '"response_format.type": must be text, json_object or json_schema',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            '"response_format.json_schema.schema": must be an object',
        ),
        ({"tool_choice": "required"}, "tool_choice", '"tool_choice": there are no tools to choose from'),
        (
            {"model": "tooler", "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            '"tool_choice": there is no tool "f"',
        ),
        (
            {"tool_choice": "some"},
            "tool_choice",
            '"tool_choice": must be auto, none, required or a function by its name',
        ),
        ({"max_tokens": 0}, "max_tokens", '"max_tokens": must be at least 1'),
        ({"temperature": "hot"}, "temperature", '"temperature": expected float, got str'),
        ({"options": {"top_k": "x"}}, "top_k", 'option "top_k" must be of type integer'),
        (
            {"reasoning_effort": "some"},
            "reasoning_effort",
            '"reasoning_effort": must be one of none, minimal, low, medium, high, max, xhigh, ultra',
        ),
        ({"reasoning_effort": "low"}, "think", '"tiny" does not support thinking'),
        ({"model": ""}, "model", "model is required"),
        ({"messages": []}, "messages", "[] is too short - 'messages'"),
        ({"tools": [WEATHER]}, "tools", "registry.ollama.ai/library/tiny:latest does not support tools"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "invalid message content type: <nil>",
        ),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[1].content[0]",
            '"messages[1].content[0]" of type "image_url" is not supported yet',
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            '"messages[0].tool_calls[0].function.arguments": is not valid JSON',
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    daemon: Daemon, more: dict[str, Any], param: str, message: str
) -> None:
    response = await daemon.post(PATH, **({"model": "tiny", "messages": HELLO} | more))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["message"], error["param"]) == (message, param)
    assert daemon.supervisor.calls == []


async def test_extras_of_openais_clients_are_ignored(daemon: Daemon) -> None:
    extras = {
        "n": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "logprobs": False,
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "logit_bias": {},
        "stop": None,
    }
    assert (await daemon.post(PATH, model="tiny", messages=HELLO, **extras)).status_code == 200


async def test_an_unknown_model(daemon: Daemon) -> None:
    response = await daemon.post(PATH, model="nobody", messages=HELLO)
    error = response.json()["error"]
    assert response.status_code == 404
    assert (error["message"], error["type"]) == ("model 'nobody' not found", "not_found_error")
    assert error["code"] == "model_not_found"


async def test_models_are_listed_and_found_by_names_with_slashes(daemon: Daemon) -> None:
    daemon.models.add("hf.co/some/repo:Q4_0")
    reply = (await daemon.client.get("/v1/models")).json()
    assert reply["object"] == "list"
    owners = {card["id"]: card["owned_by"] for card in reply["data"]}
    assert owners["tiny:latest"] == "library"
    assert owners["hf.co/some/repo:Q4_0"] == "some"

    card = (await daemon.client.get("/v1/models/hf.co/some/repo:Q4_0")).json()
    assert card == next(c for c in reply["data"] if c["id"] == "hf.co/some/repo:Q4_0")
    missing = await daemon.client.get("/v1/models/nobody")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


async def test_no_models_are_an_empty_list(daemon: Daemon) -> None:
    for model in daemon.models.store.list():
        daemon.models.store.remove(model.name.full)
    assert (await daemon.client.get("/v1/models")).json() == {"object": "list", "data": []}


@pytest.mark.parametrize(
    ("wish", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}', "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            Grammar("json_schema", '{"type":"null"}', "response_format.json_schema.schema"),
        ),
        ({"regex": "a"}, Grammar("regex", "a", "regex")),
    ],
)
async def test_what_binds_the_answer_reaches_the_runner(daemon: Daemon, wish: dict[str, Any], grammar: Grammar) -> None:
    await daemon.post(PATH, model="tiny", messages=HELLO, **wish)
    assert daemon.supervisor.request.grammar == grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_tool_can_be_forced_and_calls_limited_to_one(daemon: Daemon, choice: Any) -> None:
    body = {"model": "tooler", "messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
    await daemon.post(PATH, **body, parallel_tool_calls=False)
    request = daemon.supervisor.request
    assert (request.forced_tools, request.max_tool_calls) == (("weather",), 1)
