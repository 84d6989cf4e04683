"""/v1/messages without a runner: what reaches it, and how its words come out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.unit.api.harness import DONE, Daemon

from localllm.daemon.supervisor import Granted
from localllm.errors import ContextExceeded, Overloaded
from localllm.types import Delta, Finished, Message, ToolCall, Usage

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}


async def ask(daemon: Daemon, **body: Any) -> httpx.Response:
    return await daemon.post("/v1/messages", **{"model": "tiny", "max_tokens": 9, "messages": HELLO} | body)


async def events(daemon: Daemon, **body: Any) -> list[dict[str, Any]]:
    response = await ask(daemon, stream=True, **body)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
    found = []
    for text in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


async def test_a_whole_answer(daemon: Daemon) -> None:
    reply = (await ask(daemon)).json()
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 2,
        },
    }
    assert daemon.supervisor.request.sampling.num_predict == 9


async def test_a_stream_has_every_event_in_order(daemon: Daemon) -> None:
    call = ToolCall("call_1", "weather", {"city": "Rome"})
    daemon.supervisor.script = (Granted(1, 1), Delta(thinking="hm"), Delta("Wait."), Delta(tool_calls=(call,)), DONE)
    found = await events(daemon, model="thinker", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [event["type"] for event in found] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        *("message_delta", "message_stop"),
    ]
    blocks = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
    ]
    assert [event["delta"] for event in found if event["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "text_delta", "text": "Wait."},
        {"type": "input_json_delta", "partial_json": '{"city":"Rome"}'},
    ]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished("stop"), "end_turn", None),
        (Finished("length"), "max_tokens", None),
        (Finished("stop", stopped_by="END"), "stop_sequence", "END"),
    ],
)
async def test_why_an_answer_ended(daemon: Daemon, finished: Finished, reason: str, sequence: str | None) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("x"), finished)
    reply = (await ask(daemon, stop_sequences=["END"])).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    assert daemon.supervisor.request.sampling.stop == ("END",)


async def test_a_history_with_tools_reaches_the_model_whole(daemon: Daemon) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}, {"type": "text", "text": "quick"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ask", "signature": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and now?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    await ask(daemon, model="tooler", messages=history, system=system, tools=[WEATHER])
    request = daemon.supervisor.request
    assert request.messages == (
        Message("system", "Be brief."),
        Message("user", "weather?\nquick"),
        Message("assistant", "Wait.", thinking="ask", tool_calls=(ToolCall("t1", "weather", {"city": "Rome"}),)),
        Message("tool", "sunny", tool_name="weather", tool_call_id="t1"),
        Message("user", "and now?"),
    )
    assert request.tools[0]["function"] == {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    ("choice", "forced", "limit"),
    [
        ({"type": "auto"}, (), 0),
        ({"type": "any"}, ("weather",), 0),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, ("weather",), 1),
    ],
)
async def test_tools_can_be_forced(daemon: Daemon, choice: Any, forced: tuple[str, ...], limit: int) -> None:
    await ask(daemon, model="tooler", tools=[WEATHER], tool_choice=choice)
    request = daemon.supervisor.request
    assert (request.forced_tools, request.max_tool_calls) == (forced, limit)
    await ask(daemon, model="tooler", tools=[WEATHER], tool_choice={"type": "none"})
    assert not daemon.supervisor.request.tools


@pytest.mark.parametrize(
    ("model", "body", "think"),
    [
        ("thinker", {}, False),
        ("thinker", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, True),
        ("thinker", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ("tiny", {"thinking": {"type": "enabled"}}, None),
    ],
)
async def test_a_model_thinks_when_it_is_told_to_and_can(daemon: Daemon, model: str, body: Any, think: Any) -> None:
    await ask(daemon, model=model, **body)
    assert daemon.supervisor.request.think == think


async def test_a_thought_that_nobody_asked_for_is_not_shown(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta(thinking="hm"), Delta("yes"), DONE)
    assert (await ask(daemon)).json()["content"] == [{"type": "text", "text": "yes"}]
    assert not [event for event in await events(daemon) if "thinking" in str(event)]


async def test_tokens_are_counted_without_an_answer(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Finished("stop", Usage(num_prompt_tokens=42)))
    response = await daemon.post("/v1/messages/count_tokens", model="tiny", messages=HELLO)
    assert response.json() == {"input_tokens": 42}
    assert daemon.supervisor.request.inspect


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"model": "nobody"}, 404, "not_found_error", "model 'nobody' not found"),
        ({"max_tokens": 0}, 400, "invalid_request_error", '"max_tokens": must be at least 1'),
        ({"messages": []}, 400, "invalid_request_error", "at least one message"),
        ({"messages": [{"role": "bot", "content": ""}]}, 400, "invalid_request_error", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            '"messages[0].content[0]" images cannot be read',
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "no tools to choose from"),
        (
            {"model": "tooler", "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
            400,
            "invalid_request_error",
            'there is no tool "x"',
        ),
        ({"temperature": "hot"}, 400, "invalid_request_error", "temperature"),
    ],
)
async def test_mistakes_are_told_in_anthropics_shape(
    daemon: Daemon, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    response = await ask(daemon, **body)
    assert response.status_code == status
    reply = response.json()
    assert (reply["type"], reply["error"]["type"]) == ("error", kind)
    assert words in reply["error"]["message"]
    assert reply["request_id"] == response.headers["x-request-id"]


async def test_errors_before_and_within_a_stream(daemon: Daemon) -> None:
    daemon.supervisor.script = (Overloaded("busy", retry_after=7),)
    response = await ask(daemon, stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert response.json()["error"]["type"] == "overloaded_error"
    daemon.supervisor.script = (Granted(1, 1), Delta("He"), ContextExceeded("full"))
    last = (await events(daemon))[-1]
    assert last["error"] == {"type": "invalid_request_error", "message": "full"}
