"""Anthropic's own client, unmodified, against the real daemon and the real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from tests.e2e.clients.conftest import MODEL, Served

pytestmark = pytest.mark.model

HELLO: Any = [{"role": "user", "content": "Say hello."}]
CITY: Any = {"type": "string", "maxLength": 12}
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client


def test_a_message_whole_and_streamed(client: Any) -> None:
    fixed: Any = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "system": "Be brief."}
    fixed["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**fixed)
    assert whole.content[0].type == "text" and whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**fixed) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted(client: Any) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    usage = client.messages.create(model=MODEL, messages=HELLO, max_tokens=1).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_tool_is_called_when_it_must_be(client: Any) -> None:
    ask: Any = {"model": MODEL, "max_tokens": 60, "messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    reply = client.messages.create(**ask)
    assert reply.stop_reason == "tool_use"
    (call,) = reply.content
    assert call.type == "tool_use" and call.name == "get_weather" and set(call.input) == {"city"}
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and set(final.content[0].input) == {"city"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, max_tokens=3, messages=history).content


def test_stop_sequences(client: Any) -> None:
    reply = client.messages.create(
        model=MODEL,
        max_tokens=30,
        extra_body={"temperature": 0},
        stop_sequences=["three"],
        messages=[{"role": "user", "content": "Count in words: one, two, three, four."}],
    )
    assert reply.stop_reason != "stop_sequence" or reply.stop_sequence == "three"


def test_errors_are_typed(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not found"):
        client.messages.create(model="nobody", max_tokens=5, messages=HELLO)
    long: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(anthropic.BadRequestError, match=r"30\d\d tokens.*1024"):
        client.messages.create(model=MODEL, max_tokens=5, messages=long)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
