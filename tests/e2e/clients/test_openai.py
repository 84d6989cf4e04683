"""OpenAI's own client, unmodified, against the real daemon and the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.e2e.clients.conftest import MODEL, Served
from tests.e2e.conftest import until

pytestmark = pytest.mark.model

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    assert f"{MODEL}:latest" in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "library"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("library/nobody")


def test_a_chat_whole_and_streamed(client: Any) -> None:
    fixed: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**fixed)
    assert whole.choices[0].message.content and whole.usage is not None and whole.usage.completion_tokens <= 12
    chunks = list(client.chat.completions.create(**fixed, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] in ("stop", "length")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_when_it_must_be(client: Any, choice: Any) -> None:
    ask: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    choice = client.chat.completions.create(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    history = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    reply = client.chat.completions.create(model=MODEL, messages=history, max_tokens=5)
    assert reply.choices[0].message.content
    with client.chat.completions.stream(**ask) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "get_weather"


def test_an_answer_keeps_to_its_schema(client: Any) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, response_format=format)
    assert json.loads(reply.choices[0].message.content or "")["colour"] in ("red", "blue")
    reply = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=300, seed=1
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema.not"


def test_a_text_is_continued(client: Any) -> None:
    reply = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=6, temperature=0, echo=True)
    assert reply.choices[0].text.startswith("One, two, three, four")
    chunks = list(client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2, stream=True))
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_responses_go_on_from_each_other(client: Any) -> None:
    first = client.responses.create(model=MODEL, input="My name is Zoe.", max_output_tokens=8, temperature=0)
    assert first.output_text and first.usage is not None
    second = client.responses.create(
        model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    assert second.usage is not None and second.usage.input_tokens > first.usage.total_tokens
    with client.responses.stream(model=MODEL, input="Say hello.", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text
    tool: Any = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(model=MODEL, input="Weather?", tools=[tool], tool_choice="required")
    assert [item.type for item in called.output] == ["function_call"]


def test_errors_are_typed(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.chat.completions.create(model="nobody", messages=HELLO)
    long: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError, match=r"30\d\d tokens.*1024") as caught:
        client.chat.completions.create(model=MODEL, messages=long)
    assert caught.value.code == "context_length_exceeded"


def test_who_stops_listening_stops_the_work(client: Any, served: Served) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=900)
    next(iter(stream))
    stream.close()
    until(lambda: not served.machine.ps()[0]["runner"]["num_in_flight"])
