"""Thinking and tool calls, by family: the same result however the text is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from localllm.chat.formats import parser_for

TOOLS = ({"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "now"}})
ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1, "b": 2})


@dataclass(frozen=True)
class Case:
    """`marks` stand for the model's template: what the choice of the parser looks at."""

    marks: str
    text: str
    content: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    prompt: str = ""
    tools: bool = True


HERMES = "tools <tool_call>"
THINK = "<think></think>"
HARMONY = "<|channel|><|message|> analysis"
CODER = "<tool_call><function=<parameter="
GLM = "<tool_call><arg_key>"

CASES = {
    "plain": Case("", "just <text> {with} [brackets]", "just <text> {with} [brackets]", tools=False),
    "thinking": Case(THINK, "<think>\nhmm\n</think>\n\nYes.", "Yes.", "hmm", tools=False),
    "thinking opened by the prompt": Case(
        THINK, "hmm\n</think>\n\nYes.", "Yes.", "hmm", prompt="…<think>\n", tools=False
    ),
    "no thinking": Case(THINK, "Yes.", "Yes.", tools=False),
    "empty thinking": Case(THINK, "<think>\n\n</think>\n\nYes.", "Yes.", tools=False),
    "thinking that never ends": Case(THINK, "<think>hmm, well", "", "hmm, well", tools=False),
    "a tag in the answer is text": Case(THINK, "Use <think> tags.", "Use <think> tags.", tools=False),
    "mistral thinking": Case("[THINK][/THINK]", "[THINK]hmm[/THINK]Yes.", "Yes.", "hmm", tools=False),
    "command-r thinking": Case(
        "<|START_THINKING|>", "<|START_THINKING|>hmm<|END_THINKING|>Yes.", "Yes.", "hmm", tools=False
    ),
    "hermes": Case(HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', calls=(ADD,)),
    "hermes after text": Case(
        HERMES,
        'Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "Let me see. ",
        calls=(("now", {}),),
    ),
    "hermes, two calls": Case(
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        calls=(ADD, ("now", {})),
    ),
    "hermes, tags and braces inside a string": Case(
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": "}</tool_call>{\\"", "b": 2}}</tool_call>',
        calls=(("add", {"a": '}</tool_call>{"', "b": 2}),),
    ),
    "hermes, arguments as text": Case(
        HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', calls=(ADD,)
    ),
    "hermes, unknown tool": Case(
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ),
    "hermes, not JSON": Case(HERMES, "<tool_call>add(1, 2)</tool_call>", "<tool_call>add(1, 2)</tool_call>"),
    "hermes, cut off": Case(HERMES, '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu'),
    "thinking, then a call": Case(
        THINK + HERMES,
        '<think>I must add.</think>\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        "",
        "I must add.",
        (ADD,),
    ),
    "llama 3": Case("<|python_tag|> tools", '{"name": "add", "parameters": {"a": 1, "b": 2}}', calls=(ADD,)),
    "llama 3, several": Case(
        "<|python_tag|> tools",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
        calls=(ADD, ("now", {})),
    ),
    "llama 3, text": Case("<|python_tag|> tools", "It is {now}.", "It is {now}."),
    "llama 3, JSON that is no call": Case("<|python_tag|> tools", '{"answer": 3}', '{"answer": 3}'),
    "generic": Case("tools", '{"name": "add", "arguments": {"a": 1, "b": 2}}', calls=(ADD,)),
    "mistral list": Case("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', calls=(ADD,)),
    "mistral args": Case(
        "[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[ARGS]{}', calls=(ADD, ("now", {}))
    ),
    "qwen coder": Case(
        CODER,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        calls=(ADD,),
    ),
    "glm": Case(
        GLM,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        calls=(ADD,),
    ),
    "lfm2": Case(
        "<|tool_call_start|>", "<|tool_call_start|>[add(a=1, b=2), now()]<|tool_call_end|>", calls=(ADD, ("now", {}))
    ),
    "command-r": Case(
        "<|START_ACTION|>",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": 2}}]<|END_ACTION|>',
        calls=(ADD,),
    ),
    "granite": Case("<|tool_call|>", '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]', calls=(ADD,)),
    "harmony": Case(
        HARMONY,
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.",
        "hmm",
    ),
    "harmony call": Case(
        HARMONY,
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
        "",
        "hmm",
        (ADD,),
    ),
    "harmony, cut off": Case(HARMONY, "<|channel|>final<|message|>Ye", "Ye"),
}


def parse(case: Case, parts: list[str]) -> tuple[str, str, tuple[tuple[str, dict[str, Any]], ...]]:
    parser = parser_for(case.marks, tools=TOOLS if case.tools else (), prompt=case.prompt)
    deltas = [delta for part in parts for delta in parser.feed(part)] + parser.finish()
    calls = tuple((call.name, call.arguments) for delta in deltas for call in delta.tool_calls)
    return "".join(d.content for d in deltas), "".join(d.thinking for d in deltas), calls


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_parts_are_told_apart_however_the_text_is_cut(case: Case) -> None:
    expected = (case.content, case.thinking, case.calls)
    assert parse(case, [case.text]) == expected
    assert parse(case, list(case.text)) == expected
    for cut in range(1, len(case.text)):
        assert parse(case, [case.text[:cut], case.text[cut:]]) == expected
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, len(case.text)), min(5, len(case.text) - 1)))
        parts = [case.text[i:j] for i, j in zip([0, *cuts], [*cuts, len(case.text)], strict=True)]
        assert parse(case, parts) == expected


def test_plain_text_is_never_held_back() -> None:
    parser = parser_for("")
    assert [[d.content for d in parser.feed(part)] for part in ("<", "think", "{")] == [["<"], ["think"], ["{"]]


def test_text_is_held_back_only_while_it_may_become_a_tag() -> None:
    parser = parser_for(HERMES, tools=TOOLS)
    shown = ["".join(d.content for d in parser.feed(part)) for part in ("a", " <", "tool", "box>")]
    assert shown == ["a", " ", "", "<toolbox>"]


def test_thinking_is_recognised_also_when_nobody_asked_for_it() -> None:
    parser = parser_for(THINK, think=False)
    deltas = parser.feed("<think>\n\n</think>\n\nYes.") + parser.finish()
    assert "".join(d.content for d in deltas) == "Yes."


def test_a_long_call_is_read_whole() -> None:
    parser = parser_for(HERMES, tools=TOOLS)
    text = '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 20_000 + '"}}</tool_call>'
    deltas = [d for i in range(0, len(text), 4) for d in parser.feed(text[i : i + 4])]
    (call,) = [call for d in deltas for call in d.tool_calls]
    assert len(call.arguments["a"]) == 20_000


def test_calls_have_ids_of_their_own() -> None:
    parser = parser_for(HERMES, tools=TOOLS)
    one = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    ids = [call.id for d in parser.feed(one * 2) for call in d.tool_calls]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") and len(id) == 13 and id[5:].isalnum() and id.islower() for id in ids)
