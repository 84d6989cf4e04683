"""/v1/responses without a runner."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.api.harness import DONE, Daemon

from localllm.api import responses
from localllm.daemon.supervisor import Granted
from localllm.errors import RunnerCrashed
from localllm.types import Delta, Finished, Grammar, Message, ToolCall

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}


async def ask(daemon: Daemon, **body: Any) -> dict[str, Any]:
    response = await daemon.post(PATH, **{"model": "tiny", "input": "hello"} | body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


async def events(daemon: Daemon, **body: Any) -> list[dict[str, Any]]:
    response = await daemon.post(PATH, **{"model": "tiny", "input": "hello", "stream": True} | body)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
    found = []
    for text in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_whole_answer(daemon: Daemon) -> None:
    reply = await ask(daemon, instructions="Be brief.", max_output_tokens=9)
    assert reply["id"].startswith("resp_")
    (item,) = reply["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
    }
    assert (reply["object"], reply["status"], reply["error"]) == ("response", "completed", None)
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] == 4
    request = daemon.supervisor.request
    assert request.messages == (Message("system", "Be brief."), Message("user", "hello"))
    assert request.sampling.num_predict == 9 and not request.truncate


async def test_a_stream_tells_each_step(daemon: Daemon) -> None:
    call = ToolCall("call_1", "weather", {"city": "Rome"})
    daemon.supervisor.script = (
        Granted(1, 1),
        Delta(thinking="hm"),
        Delta("Wa"),
        Delta("it."),
        Delta(tool_calls=(call,)),
        DONE,
    )
    found = await events(daemon, model="tooler", tools=[WEATHER])
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.get("output_index") for event in found[2:-1]] == [0] * 6 + [1] * 7 + [2] * 4
    assert found[0]["response"]["output"] == [] and found[9]["part"]["text"] == ""
    thought, said, called = found[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert said["content"][0]["text"] == "Wait."
    assert (called["call_id"], called["name"], called["arguments"]) == ("call_1", "weather", '{"city":"Rome"}')


async def test_an_answer_that_is_cut_is_incomplete(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("x"), Finished("length"))
    reply = await ask(daemon)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (await events(daemon))[-1]["type"] == "response.incomplete"


async def test_a_stream_that_breaks_off_says_so(daemon: Daemon) -> None:
    daemon.supervisor.script = (Granted(1, 1), Delta("x"), RunnerCrashed("it died"))
    last = (await events(daemon))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "runner_crashed", "message": "it died"}


async def test_a_history_reaches_the_model_whole(daemon: Daemon) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "ask"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    await ask(daemon, model="tooler", input=items, tools=[WEATHER])
    request = daemon.supervisor.request
    assert request.messages == (
        Message("system", "Be brief."),
        Message("user", "weather?"),
        Message("assistant", "Wait.", thinking="ask", tool_calls=(ToolCall("c1", "weather", {"city": "Rome"}),)),
        Message("tool", "sunny", tool_name="weather", tool_call_id="c1"),
    )
    assert request.tools[0]["function"]["description"] == "Tells it."


async def test_a_conversation_goes_on_from_an_earlier_response(daemon: Daemon) -> None:
    call = ToolCall("c1", "weather", {})
    daemon.supervisor.script = (Granted(1, 1), Delta("Wait.", tool_calls=(call,)), DONE)
    first = await ask(daemon, model="tooler", tools=[WEATHER], instructions="Only now.")
    output = [{"type": "function_call_output", "call_id": "c1", "output": "sunny"}]
    second = await ask(daemon, model="tooler", previous_response_id=first["id"], input=output)
    assert daemon.supervisor.request.messages == (
        Message("user", "hello"),
        Message("assistant", "Wait.", tool_calls=(call,)),
        Message("tool", "sunny", tool_name="weather", tool_call_id="c1"),
    )
    assert second["previous_response_id"] == first["id"]


async def test_what_need_not_be_stored_or_is_too_much_is_forgotten(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_CONVERSATIONS", 2)
    ids = [(await ask(daemon, store=store))["id"] for store in (False, True, True, True)]
    known = [await daemon.post(PATH, model="tiny", input="x", previous_response_id=id) for id in ids]
    assert [response.status_code for response in known] == [400, 400, 200, 400]
    assert known[0].json()["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "bot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_mistakes_name_the_field(daemon: Daemon, body: dict[str, Any], param: str) -> None:
    response = await daemon.post(PATH, **{"model": "tiny", "input": "hello"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_schema_binds_the_answer(daemon: Daemon) -> None:
    await ask(daemon, text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}, "strict": True}})
    grammar = Grammar("json_schema", '{"type":"null"}', "text.format.json_schema.schema")
    assert daemon.supervisor.request.grammar == grammar
