"""/api/chat, as a client on a socket sees it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from tests.unit.api.harness import DONE, Daemon, parse_time

from localllm.daemon.supervisor import Granted
from localllm.errors import QueueFull, RunnerCrashed
from localllm.protocol.messages import Prefill
from localllm.types import Delta, Finished, Grammar, Message, ToolCall, Usage

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": ["object", "null"]}}}


async def test_a_stream_is_one_object_per_line_and_ends_with_the_metrics(daemon: Daemon) -> None:
    first, second, last = await daemon.lines("/api/chat", model="Tiny", messages=HELLO)

    created = parse_time(first.pop("created_at"))
    assert abs((datetime.now(timezone.utc) - created).total_seconds()) < 60
    assert first == {"model": "Tiny", "message": {"role": "assistant", "content": "Hel"}, "done": False}
    assert second["message"]["content"] == "lo"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["load_duration"] > 0
    assert last["total_duration"] >= last["load_duration"]
    del last["created_at"], last["load_duration"], last["total_duration"]
    assert last == {
        "model": "Tiny",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 7,
        "prompt_cached_count": 4,
        "prompt_eval_duration": 2_000_000,
        "eval_count": 2,
        "eval_duration": 3_000_000,
    }


async def test_without_streaming_the_answer_is_one_object(daemon: Daemon) -> None:
    response = await daemon.post("/api/chat", model="tiny", messages=HELLO, stream=False)
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    reply = response.json()
    assert reply["message"] == {"role": "assistant", "content": "Hello"}
    assert (reply["done"], reply["eval_count"]) == (True, 2)


async def test_progress_of_the_prompt_is_not_shown(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Prefill("x", 3, 7), DONE)
    assert len(await daemon.lines("/api/chat", model="tiny", messages=HELLO)) == 1


async def test_dropped_messages_are_told(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Finished("length", Usage(9, 0, 1, num_dropped_messages=3)))
    (last,) = await daemon.lines("/api/chat", model="tiny", messages=HELLO)
    assert (last["done_reason"], last["truncated"], last["dropped_message_count"]) == ("length", True, 3)
    assert daemon.supervisor.request.truncate
    await daemon.lines("/api/chat", model="tiny", messages=HELLO, truncate=False)
    assert not daemon.supervisor.request.truncate


@pytest.mark.parametrize("stream", [True, False])
async def test_tool_calls_come_whole_with_arguments_as_an_object(daemon: Daemon, stream: bool) -> None:
    calls = (ToolCall("call_1", "weather", {"city": "Rome"}), ToolCall("call_2", "weather", {}))
    daemon.supervisor.script = (
        *(Granted(1, 1), Delta("Wait."), Delta(tool_calls=calls[:1]), Delta(tool_calls=calls[1:]), DONE),
    )
    body: dict[str, Any] = {"model": "tooler", "messages": HELLO, "tools": [WEATHER]}
    if stream:
        lines = await daemon.lines("/api/chat", **body)
        shown = [call for line in lines for call in line["message"].get("tool_calls", [])]
        assert "tool_calls" not in lines[0]["message"]
    else:
        shown = (await daemon.post("/api/chat", stream=False, **body)).json()["message"]["tool_calls"]
    assert shown == [
        {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
        {"id": "call_2", "function": {"index": 1, "name": "weather", "arguments": {}}},
    ]
    assert daemon.supervisor.request.tools == (WEATHER,)


async def test_thinking_has_a_field_of_its_own(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta(thinking="hm"), Delta("yes"), DONE)
    thought, said, last = await daemon.lines("/api/chat", model="thinker", messages=HELLO)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert said["message"] == {"role": "assistant", "content": "yes"}
    assert "thinking" not in last["message"]


@pytest.mark.parametrize(
    ("model", "wish", "think"),
    [
        ("thinker", {}, True),
        ("thinker", {"think": None}, True),
        ("thinker", {"think": False}, False),
        ("thinker", {"think": "high"}, "high"),
        ("tiny", {}, None),
        ("tiny", {"think": False}, None),
    ],
)
async def test_models_that_can_think_do_so_unless_told_otherwise(
    daemon: Daemon, model: str, wish: dict[str, Any], think: Any
) -> None:
    await daemon.post("/api/chat", model=model, messages=HELLO, **wish)
    assert daemon.supervisor.request.think == think


async def test_a_history_reaches_the_model_whole(daemon: Daemon) -> None:
    history = [
        {"role": "USER", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "thinking": "ask",
            "tool_calls": [{"id": "c1", "Function": {"Name": "weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "content": "sunny", "tool_name": "weather", "tool_call_id": "c1"},
    ]
    await daemon.post("/api/chat", model="tiny", messages=history)
    assert daemon.supervisor.request.messages == (
        Message("user", "weather?"),
        Message("assistant", thinking="ask", tool_calls=(ToolCall("c1", "weather", {"city": "Rome"}),)),
        Message("tool", "sunny", tool_name="weather", tool_call_id="c1"),
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (HELLO, [("system", "Be brief."), ("user", "Q"), ("assistant", "A"), ("user", "hello")]),
        (
            [{"role": "system", "content": "Be long."}, *HELLO],
            [("user", "Q"), ("assistant", "A"), ("system", "Be long."), ("user", "hello")],
        ),
    ],
)
async def test_the_modelfiles_words_come_first(
    daemon: Daemon, messages: list[dict[str, str]], expected: list[tuple[str, str]]
) -> None:
    daemon.models.add("butler", system="Be brief.", messages=[("user", "Q"), ("assistant", "A")])
    await daemon.post("/api/chat", model="butler", messages=messages)
    assert daemon.supervisor.request.messages == tuple(Message(role, text) for role, text in expected)  # type: ignore[arg-type]


async def test_options_of_the_request_go_before_the_modelfiles(daemon: Daemon) -> None:
    daemon.models.add("tuned", parameters={"temperature": 0.1, "top_k": 7, "num_ctx": 512, "stop": ["a"]})
    await daemon.post("/api/chat", model="tuned", messages=HELLO, options={"temperature": 0.5, "stop": ["b", ""]})
    (call,) = daemon.supervisor.calls
    sampling = daemon.supervisor.request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.5, 7, ("b",))
    assert (sampling.top_p, call.wishes.num_ctx) == (0.9, 512)


async def test_a_changed_model_is_noticed(daemon: Daemon) -> None:
    await daemon.post("/api/chat", model="tiny", messages=HELLO)
    daemon.models.add("tiny", system="New.")
    await daemon.post("/api/chat", model="tiny", messages=HELLO)
    assert daemon.supervisor.request.messages == (Message("system", "New."), Message("user", "hello"))
    await daemon.client.request("DELETE", "/api/delete", json={"model": "tiny"})
    assert (await daemon.post("/api/chat", model="tiny", messages=HELLO)).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 400, "model is required"),
        ({"model": "", "messages": HELLO}, 400, "model is required"),
        ({"model": "nobody", "messages": HELLO}, 404, "model 'nobody' not found"),
        ({"model": "a//b", "messages": HELLO}, 400, "invalid model name"),
        ({"model": "embedder", "messages": HELLO}, 400, '"embedder" does not support chat'),
        (
            {"model": "tiny", "messages": HELLO, "tools": [WEATHER]},
            400,
            "registry.ollama.ai/library/tiny:latest does not support tools",
        ),
        ({"model": "tiny", "messages": HELLO, "think": True}, 400, '"tiny" does not support thinking'),
        ({"model": "tiny", "messages": HELLO, "think": "low"}, 400, '"tiny" does not support thinking'),
        (
            {"model": "thinker", "messages": HELLO, "think": "hard"},
            400,
            'invalid think value: "hard" (must be "high", "medium", "low", "max", true, or false)',
        ),
        (
            {"model": "thinker", "messages": HELLO, "think": 3},
            400,
            'think must be a boolean or string ("high", "medium", "low", "max", true, or false)',
        ),
        ({"model": "tiny", "messages": HELLO, "top_logprobs": 21}, 400, "top_logprobs must be between 0 and 20"),
        (
            {"model": "tiny", "messages": HELLO, "format": "json", "regex": "a"},
            400,
            '"regex": format and regex cannot be used together',
        ),
        (
            {"model": "tiny", "messages": HELLO, "format": "xml"},
            400,
            'invalid format: "xml"; expected "json" or a valid JSON Schema object',
        ),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "see", "images": ["aGk="]}]},
            400,
            '"messages[0].images": images cannot be read',
        ),
        (
            {"model": "tiny", "messages": [{"role": "bishop", "content": "hi"}]},
            400,
            '"messages[0].role": "bishop" is not system, user, assistant or tool',
        ),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": 3}]},
            400,
            '"messages[0].content": expected str, got int',
        ),
        ({"model": "tiny", "messages": HELLO, "stream": "yes"}, 400, '"stream": expected bool, got str'),
        (
            {"model": "tooler", "messages": HELLO, "tools": [WEATHER, {"type": "function"}]},
            400,
            '"tools[1].function.name" is missing',
        ),
        (
            {"model": "tiny", "messages": HELLO, "options": {"num_ctx": "many"}},
            500,
            'option "num_ctx" must be of type integer',
        ),
        ({"model": "tiny", "messages": HELLO, "keep_alive": "abc"}, 400, 'time: invalid duration "abc"'),
        ({"model": "tiny", "messages": HELLO, "keep_alive": True}, 400, "Unsupported type: 'bool'"),
    ],
)
async def test_mistakes_are_answered_in_ollamas_words(
    daemon: Daemon, body: dict[str, Any], status: int, error: str
) -> None:
    response = await daemon.post("/api/chat", **body)
    assert (response.status_code, response.json()["error"]) == (status, error)
    assert "application/json" in response.headers["content-type"]
    assert daemon.supervisor.calls == []


@pytest.mark.parametrize("format", ["", None])
async def test_an_empty_format_asks_for_nothing(daemon: Daemon, format: str | None) -> None:
    assert (await daemon.post("/api/chat", model="tiny", messages=HELLO, format=format)).status_code == 200


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "missing request body"),
        (b"  \n", "missing request body"),
        (b"[]", "the request body must be a JSON object"),
        (b"{", "the request body is not valid JSON: Input data was truncated"),
        (b'{"model":' + b"[" * 100_000, "the request body is nested too deeply"),
    ],
)
async def test_bodies_that_are_no_objects(daemon: Daemon, content: bytes, error: str) -> None:
    response = await daemon.client.post("/api/chat", content=content)
    assert (response.status_code, response.json()["error"]) == (400, error)


async def test_a_body_is_json_whatever_it_is_called(daemon: Daemon) -> None:
    content = b'{"MODEL": "tiny", "Messages": [{"Role": "user", "CONTENT": "hi"}], "stream": null, "whatever": 1}'
    response = await daemon.client.post(
        "/api/chat", content=content, headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert response.status_code == 200
    assert daemon.supervisor.request.messages == (Message("user", "hi"),)


async def test_an_error_before_the_first_byte_has_its_own_status(daemon: Daemon) -> None:
    daemon.supervisor.script = (QueueFull("server busy", hint="Wait.", retry_after=7),)
    for stream in (True, False):
        response = await daemon.post("/api/chat", model="tiny", messages=HELLO, stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "7"
        assert response.json() == {"error": "server busy", "code": "queue_full", "hint": "Wait."}


async def test_an_error_later_is_the_last_line(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("Hel"), RunnerCrashed("the runner died"))
    first, last = await daemon.lines("/api/chat", model="tiny", messages=HELLO)
    assert first["message"]["content"] == "Hel"
    assert last == {"error": "the runner died", "code": "runner_crashed"}


async def test_a_mistake_of_ours_tells_no_secrets(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("Hel"), ValueError("secret"))
    lines = await daemon.lines("/api/chat", model="tiny", messages=HELLO)
    assert lines[-1]["error"] == "internal error"
    daemon.supervisor.script = (ValueError("secret"),)
    response = await daemon.post("/api/chat", model="tiny", messages=HELLO)
    assert (response.status_code, response.json()["error"]) == (500, "internal error")
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [True, False])
async def test_no_messages_load_the_model(daemon: Daemon, stream: bool) -> None:
    response = await daemon.post("/api/chat", model="tiny", stream=stream, keep_alive="10m", options={"num_ctx": 64})
    reply = response.json()
    del reply["created_at"]
    assert reply == {
        "model": "tiny",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "load",
    }
    (load,) = daemon.supervisor.loads
    assert (load.keep_alive, load.wishes.num_ctx) == (600.0, 64)
    assert daemon.supervisor.calls == []


async def test_no_messages_and_no_time_unload_it(daemon: Daemon) -> None:
    response = await daemon.post("/api/chat", model="tiny", messages=[], keep_alive=0)
    assert (response.json()["done_reason"], response.json()["done"]) == ("unload", True)
    assert daemon.supervisor.unloads == ["tiny:latest"]
    assert daemon.supervisor.loads == []


async def test_loading_says_early_that_a_model_cannot_think(daemon: Daemon) -> None:
    response = await daemon.post("/api/chat", model="tiny", think=True)
    assert (response.status_code, response.json()["error"]) == (400, '"tiny" does not support thinking')
    assert daemon.supervisor.loads == []


@pytest.mark.parametrize(
    ("wish", "grammar"),
    [
        ({"format": ""}, None),
        ({"format": None}, None),
        ({"format": "json"}, Grammar("json_schema", '{"type":"object"}')),
        ({"format": {"type": "string"}}, Grammar("json_schema", '{"type":"string"}')),
        ({"regex": "a+"}, Grammar("regex", "a+", "regex")),
        ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"', "grammar")),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"', "grammar")),
    ],
)
async def test_what_binds_the_answer_reaches_the_runner(
    daemon: Daemon, wish: dict[str, Any], grammar: Grammar | None
) -> None:
    await daemon.post("/api/chat", model="tiny", messages=HELLO, **wish)
    assert daemon.supervisor.request.grammar == grammar
    await daemon.post("/api/generate", model="tiny", prompt="x", **wish)
    assert daemon.supervisor.request.grammar == grammar


async def test_the_prompt_alone_can_be_asked_for(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Finished("stop", prompt="<user>hello"))
    reply = (await daemon.post("/api/chat", model="tiny", messages=HELLO, _debug_render_only=True)).json()
    assert reply["_debug_info"] == {"rendered_template": "<user>hello", "image_count": 0}
    assert daemon.supervisor.request.inspect
