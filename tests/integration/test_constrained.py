"""Answers that must have a form, from the real runner and the real model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fixtures.runners import OPTIONS, Runner, chat, running

from localllm.protocol.messages import Done, Failed, Text
from localllm.types import ChatRequest, Grammar, SamplingParams, ToolCall

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "mood", "friends"],
    "additionalProperties": False,
    "$defs": {"friend": {"anyOf": [{"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}, {"type": "null"}]}},
}
WEATHER: dict[str, Any] = {
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
NOTHING = {"type": "function", "function": {"name": "nothing", "parameters": {"properties": []}}}
# Thinks first, and writes calls between tags, of which this vocabulary knows none.
THINKER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{# <think></think> <tool_call></tool_call> tools #}"
)


@pytest.fixture(scope="module")
def runner(chat_model: Path) -> Iterator[Runner]:
    with running(chat_model) as runner:
        yield runner


def schema(source: Any, **fields: Any) -> ChatRequest:
    grammar = Grammar("json_schema", json.dumps(source))
    sampling = SamplingParams(temperature=0, num_predict=fields.pop("num_predict", 200))
    return chat("x", "Tell me about Anna.", grammar=grammar, sampling=sampling, **fields)


def test_an_answer_keeps_to_its_schema_and_then_ends(runner: Runner) -> None:
    answer = runner.ask(schema(PERSON))
    person = json.loads(answer.text)
    assert set(person) == {"name", "age", "mood", "friends"}
    assert person["mood"] in ("good", "bad") and 0 <= person["age"] <= 150
    assert all(friend is None or re.fullmatch("[A-Z][a-z]{1,8}", friend) for friend in person["friends"])
    assert answer.finished is not None and answer.finished.finish_reason == "stop"


def test_json_mode_ends_after_the_value_although_nobody_asked_for_json(runner: Runner) -> None:
    request = schema({"type": "object", "maxProperties": 2, "additionalProperties": {"type": "integer"}})
    answer = runner.ask(msgspec.structs.replace(request, sampling=SamplingParams(seed=1, num_predict=400)))
    assert isinstance(json.loads(answer.text), dict)
    assert answer.finished is not None and answer.finished.finish_reason == "stop"
    assert not answer.text.endswith((" ", "\n"))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"[0-9]{3}-[0-9]{2}"), r"\d{3}-\d{2}"),
        (Grammar("lark", 'start: ("yes" | "no") "!"'), "(yes|no)!"),
        (Grammar("gbnf", 'root ::= "a" [b-d]+ "e"\n'), "a[b-d]+e?"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_regular_expressions_and_grammars_bind_too(runner: Runner, grammar: Grammar, pattern: str) -> None:
    answer = runner.ask(chat("x", "Hello!", grammar=grammar))
    assert re.fullmatch(pattern, answer.text)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
            "format.properties.a.pattern",
        ),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "format.items.uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, "format.anyOf[1].not"),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"type": "strng"}}}, "format.$defs.b"),
        ({"$ref": "#/nowhere"}, "format"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_its_path(runner: Runner, source: Any, path: str) -> None:
    answer = runner.ask(schema(source))
    assert answer.error is not None and not answer.text
    assert answer.error.error.details["field"] == path
    assert answer.error.error.message.startswith(f'"{path}" cannot be used: ')


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "(a", "regex"), Grammar("lark", "start: a", "grammar"), Grammar("gbnf", "a ::=", "g")]
)
def test_broken_grammars_are_refused_by_name(runner: Runner, grammar: Grammar) -> None:
    answer = runner.ask(chat("x", "Hello!", grammar=grammar))
    assert answer.error is not None and answer.error.error.details["field"] == grammar.field


def ask_for_calls(runner: Runner, request: ChatRequest) -> tuple[list[ToolCall], str, str]:
    """Calls, text and thinking of the answer."""
    runner.send(request)
    calls: list[ToolCall] = []
    text = thinking = ""
    while True:
        for item in runner.frame().items:
            assert not isinstance(item, Failed), item
            if isinstance(item, Text):
                calls += item.delta.tool_calls
                text += item.delta.content
                thinking += item.delta.thinking
            elif isinstance(item, Done):
                return calls, text, thinking


@pytest.mark.parametrize("names", [("get_weather",), ("nothing",), ("get_weather", "nothing")])
def test_a_small_model_calls_the_tool_that_it_must(runner: Runner, names: tuple[str, ...]) -> None:
    request = schema({}, tools=(WEATHER, NOTHING), forced_tools=names, num_predict=60)
    calls, text, _ = ask_for_calls(runner, request)
    assert len(calls) == 1 and calls[0].name in names and not text
    assert set(calls[0].arguments) == ({"city"} if calls[0].name == "get_weather" else set())


def test_a_call_that_is_cut_short_is_shown_as_the_text_that_it_is(runner: Runner) -> None:
    request = schema({}, tools=(WEATHER,), forced_tools=("get_weather",), num_predict=5)
    calls, text, _ = ask_for_calls(runner, request)
    assert not calls and text.startswith('{"name"')


def test_a_model_that_may_think_answers_in_form(chat_model: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, num_parallel=1)
    with running(chat_model, options, THINKER) as runner:
        for think in (True, False):
            _, text, thinking = ask_for_calls(runner, schema({"enum": ["tea", "coffee"]}, think=think))
            assert json.loads(text) in ("tea", "coffee")
            assert not thinking
        calls, text, _ = ask_for_calls(runner, schema({}, tools=(WEATHER,), forced_tools=("get_weather",), think=False))
        assert [call.name for call in calls] == ["get_weather"] and not text
