"""What templates may do, what they are given, and where their limits are."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.chat.zoo import TOOL, load

from localllm.chat import limits
from localllm.chat.filters import Refusal
from localllm.chat.limits import LimitExceeded
from localllm.chat.template import ChatTemplate
from localllm.errors import TemplateError
from localllm.types import Message, ToolCall

USER = (Message("user", "hi"),)


def render(source: str, messages: tuple[Message, ...] = USER, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0]['role'] }}", "user"),
        ("{% for m in messages %}\n{{ m.content }}\n{% endfor %}", "hi\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(9) if i % 4 == 1 %}{{ loop.index }}{{ i }}{{ loop.last }} {% endfor %}", "11False 25True "),
        ("{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{% endfor %}", "x1"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ add_generation_prompt }}", "True"),
        ("{{ '=' * 5 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 7 % 4 }}", "=====683"),
        ("{{ [1, 2] + [3] }}{{ 'a' + 'b' ~ 3 }}", "[1, 2, 3]ab3"),
        ("{{ tools is none }}", "True"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{{ {'k': 'ä<b>'} | tojson }}", '{"k": "ä<b>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ messages | map(attribute='role') | tojson }}", '["user"]'),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c', 'd']) }}", "a, bc-d"),
        ("{{ messages | join('|', attribute='content') }}", "hi"),
        ("{{ 'aXbX' | replace('X', 'yy') }}{{ 'aXbX'.replace('X', 'z', 1) }}", "ayybyyazbX"),
        ("{% for i in [1] %}{% set a = 'x'.replace('x', 'y') %}{{ a }}{% endfor %}", "y"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ '{}-{:>3}'.format('a', 1) }}{{ '%s%02d' | format('b', 7) }}{{ '%d%%' % 5 }}", "a-  1b075%"),
        ("{{ [1, 2] | sum }}{{ [{'n': 1}] | sum(attribute='n') }}", "31"),
        ("{% macro m(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}", "12"),
        ("{% set ns = namespace(n=0) %}{% for i in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{{ messages[::-1][0].content[:1] }}", "h"),
    ],
)
def test_templates_can_do_what_transformers_lets_them(source: str, text: str) -> None:
    assert render(source) == text


def test_tools_calls_and_thinking_reach_the_template() -> None:
    messages = (
        Message("assistant", thinking="hmm", tool_calls=(ToolCall("c1", "add", {"a": 1}),)),
        Message("tool", "2", tool_name="add", tool_call_id="c1"),
    )
    source = (
        "{{ tools[0].function.name }} {{ messages[0].reasoning_content }} {{ messages[0].thinking }} "
        "{{ messages[0].tool_calls[0].function.arguments | tojson }} "
        "{{ messages[1].name }} {{ messages[1].tool_call_id }}"
    )
    assert render(source, messages, tools=(TOOL,)) == 'add hmm hmm {"a": 1} add c1'


@pytest.mark.parametrize(
    ("think", "text"),
    [
        (None, "unset unset unset"),
        (True, "True True unset"),
        (False, "False False unset"),
        ("low", "True True low"),
        ("max", "True True high"),
    ],
)
def test_the_wish_to_think_reaches_the_template(think: Any, text: str) -> None:
    names = ("enable_thinking", "thinking", "reasoning_effort")
    source = " ".join("{{ %s | default('unset') }}" % name for name in names)  # noqa: UP031
    assert render(source, think=think) == text


def test_a_model_that_cannot_but_think_is_asked_to_think_the_least() -> None:
    assert "Reasoning: low" in load("harmony").render(USER, think=False)
    assert "Reasoning: medium" in load("harmony").render(USER)


def test_thinking_that_the_template_begins_is_ended_for_who_wants_none() -> None:
    template = load("deepseek")
    assert template.render(USER, think=True).endswith("<｜Assistant｜><think>\n")
    assert template.render(USER, think=False).endswith("<｜Assistant｜><think>\n\n</think>\n\n")
    assert load("qwen3").render(USER, think=False).endswith("<think>\n\n</think>\n\n")
    assert render("{{ '[THINK]' }}{# [/THINK] #}", think=False) == "[THINK][/THINK]"


def test_bos_is_written_once() -> None:
    template = load("llama3")
    assert template.starts_with_bos(template.render(USER))
    assert not load("qwen3").starts_with_bos(load("qwen3").render(USER))
    assert not ChatTemplate("x").starts_with_bos("x")


# --- What templates want their data to be like, found out by trying.


CALL = (
    Message("user", "2 + 3?"),
    Message("assistant", tool_calls=(ToolCall("call_0123abcd", "add", {"a": 2, "b": 3}),)),
    Message("tool", "5", tool_name="add", tool_call_id="call_0123abcd"),
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 2, "b": 3}}'),
        ("deepseek", 'function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": 3}\n```<｜tool▁call▁end｜>'),
        ("harmony", 'to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>'),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_wants_them(name: str, text: str) -> None:
    assert text in load(name).render(CALL, tools=(TOOL,))


def test_ids_are_shortened_for_templates_that_insist_and_still_belong_together() -> None:
    prompt = load("mistral").render(CALL, tools=(TOOL,))
    id = prompt.split('"id": "')[1].split('"')[0]
    assert len(id) == 9
    assert f'"call_id": "{id}"' in prompt


def test_ids_are_left_alone_where_they_may_be() -> None:
    source = (
        "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    )
    assert "call_0123abcd" in render(source + "{% endfor %}", CALL)


def test_content_is_a_list_of_parts_where_the_template_wants_one() -> None:
    assert "<|user|>hi<|end|>" in load("vision").render(USER)


def test_content_is_text_where_both_will_do() -> None:
    source = "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text ~ '!' }}"
    assert render(source) == "hi"


def test_a_template_that_cannot_do_without_tools_gets_an_empty_list() -> None:
    assert render("{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}") == "hi"


def test_hidden_tools_are_noticed() -> None:
    assert load("gemma").hides_tools
    assert load("deepseek").hides_tools
    assert not load("qwen3").hides_tools
    assert not load("smollm3").hides_tools


# --- Hostile and broken templates.


@pytest.mark.parametrize(
    "expression",
    [
        "lipsum.__globals__.os.system('touch MARK')",
        "cycler.__init__.__globals__.os.system('touch MARK')",
        "namespace.__init__.__globals__",
        "raise_exception.__globals__",
        "strftime_now.__globals__",
        "''.__class__.__mro__[1].__subclasses__()",
        "self.__init__.__globals__",
        "(messages | attr('__class__')).__mro__",
        "messages.append(1)",
        "messages[0].update({'role': 'x'})",
        "(5).to_bytes(2, 'big')",
    ],
)
def test_nothing_leads_out_of_the_sandbox(expression: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(TemplateError):
        render("{{ " + expression.replace("MARK", str(mark)) + ".x }}")
    assert not mark.exists()


def test_formatting_shows_no_attributes() -> None:
    assert "class" not in render("{{ '{0.__class__}'.format(messages) }}")


BIG = "{% set big = 'x' * 1000000 %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "counting": "{% set ns = namespace(i=0) %}{% for a in range(99999) %}{% for b in range(999) %}"
    "{% set ns.i = ns.i + 1 %}{% endfor %}{% endfor %}",
    "a loop's condition": "{% for a in range(99999) %}{% for b in range(99999) if b == -1 %}{% endfor %}{% endfor %}",
    "recursion": "{% for a in [range(9)] * 9 recursive %}{{ loop([range(9)] * 9) }}{% endfor %}",
    "filters": "{% set l = range(99999) | list %}{% for a in l %}{{ l | map('string') | map('upper') | list | length }}"
    "{% endfor %}",
    "tests": "{% set l = range(9999) | list %}{{ l | select('in', l) | list | length }}" * 20,
    "straight on": BIG + "{{ (big | replace('x', 'y') | upper | lower | trim) | length }}" * 500,
    "comparing": BIG + "{% for a in range(99999) %}{% if big + '1' == big + '2' %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_work_comes_to_an_end_in_any_thread(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    errors: list[Exception] = []

    def work() -> None:
        try:
            ChatTemplate(source).render(USER)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], TemplateError)


def test_a_template_has_two_seconds() -> None:
    template = ChatTemplate(ENDLESS["loops"])
    started = time.monotonic()
    with pytest.raises(LimitExceeded, match="ran for more than 2 s"):
        template.render(USER)
    assert time.monotonic() - started < 4


LARGE = {
    "repeating": "{{ 'a' * 10**9 }}",
    "repeating lists": "{{ [0] * 999999999 }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "factors": "{% set ns = namespace(i=9) %}{% for a in range(99) %}{% set ns.i = ns.i * ns.i %}{% endfor %}",
    "ranges": "{{ range(10**9) }}",
    "doubling": "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "adding": "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "nesting lists": "{% set ns = namespace(s=[1]) %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}",
    "nesting pairs": "{% set n = namespace(s=(1,)) %}{% for a in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}",
    "nesting dicts": "{% set n = namespace(s=1) %}{% for a in range(60) %}{% set n.s = {1: n.s, 2: n.s} %}{% endfor %}",
    "widths": "{{ '{:999999999}'.format(1) }}",
    "widths from arguments": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "printf widths": "{{ '%999999999d' % 1 }}",
    "printf widths from arguments": "{{ '%*d' | format(999999999, 1) }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "centring": "{{ 'a' | center(10**9) }}",
    "replacing": BIG + "{{ big | replace('x', big) }}",
    "replacing by method": BIG + "{{ big.replace('x', big) }}",
    "joining": BIG + "{{ range(99999) | join(big) }}",
    "joining by method": BIG + "{{ big.join(range(9999) | map('string')) }}",
    "indenting": "{% set lines = '\n' * 1000000 %}{{ lines | indent(10**6) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=10**9) }}",
    "summing lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "printing": BIG + "{% for a in range(99999) %}{{ big }}{% endfor %}",
    "printing in a macro": BIG
    + "{% macro m() %}{% for a in range(99999) %}{{ big }}{% endfor %}{% endmacro %}{{ m() }}",
    "many slices": BIG + "{% for a in range(99999) %}{% set x = big[1:] %}{% endfor %}",
    "dates": "{{ strftime_now('%c' * 1000) }}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_nothing_large_is_made_however(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(USER)
    assert time.monotonic() - started < 2


def test_a_long_conversation_is_not_taken_for_a_hostile_template() -> None:
    messages = (Message("user", "x" * 9_000_000),)
    template = ChatTemplate("{% for m in messages[:] + [] %}{{ '<' + m.content | trim + '>' }}{% endfor %}")
    assert len(template.render(messages)) == 9_000_002


def test_a_namespace_is_not_printed() -> None:
    assert render("{% set a = namespace(x='secret') %}{{ a }}") == "<Namespace>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ none.x.y }}",
        "{{ messages | sort(attribute='x.y') | first | int + 'a' }}",
        "{{ strftime_now(7) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
        "{{ raise_exception() }}",
        "{{ {}[[]] | tojson }}",
        "{{ messages | first | tojson(indent='x') }}",
    ],
)
def test_a_bug_in_a_template_is_its_own_kind_of_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{{ x | nosuchfilter }}", "{{ " + "(" * 9999])
def test_a_template_that_does_not_compile_says_so_at_once(source: str) -> None:
    with pytest.raises(TemplateError, match="cannot be used"):
        ChatTemplate(source)


def test_an_absurdly_long_template_is_not_even_compiled() -> None:
    with pytest.raises(TemplateError, match="absurdly long"):
        ChatTemplate("x" * 1_000_000)


def test_a_refusal_is_told_from_a_failure() -> None:
    with pytest.raises(Refusal, match="only pairs"):
        render("{{ raise_exception('only pairs') }}")


def test_after_a_failure_the_template_works_as_before() -> None:
    template = ChatTemplate(
        "{% for i in range(n | default(messages[0].content | int)) %}{{ '=' * 999999 }}{% endfor %}"
    )
    with pytest.raises(LimitExceeded):
        template.render((Message("user", "99"),))
    assert len(template.render((Message("user", "3"),))) == 3 * 999_999


def test_without_a_template_the_fallback_is_used_and_says_so() -> None:
    template = ChatTemplate("  ")
    assert template.is_fallback
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
