"""The sandbox: what templates may do, and what hostile ones cannot."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from localllm.chat import template as template_module
from localllm.chat.template import ChatTemplate, Refusal
from localllm.errors import TemplateError
from localllm.types import Message, ToolCall

USER = (Message("user", "hi"),)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def render(source: str, messages: tuple[Message, ...] = USER, **options: object) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0]['role'] }}", "user"),
        ("{% for m in messages %}\n{{ m.content }}\n{% endfor %}", "hi\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ add_generation_prompt }}", "True"),
        ("{{ '=' * 5 }}{{ 2 * 3 }}", "=====6"),
        ("{{ tools is none }}", "True"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{{ {'k': 'ä<b>'} | tojson }}", '{"k": "ä<b>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
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
        "{{ tools[0].function.name }} {{ messages[0].reasoning_content }} "
        "{{ messages[0].tool_calls[0].function.arguments | tojson }} "
        "{{ messages[1].name }} {{ messages[1].tool_call_id }}"
    )
    assert render(source, messages, tools=(TOOL,)) == 'add hmm {"a": 1} add c1'


@pytest.mark.parametrize(
    ("think", "text"), [(None, "unset unset"), (True, "True unset"), (False, "False unset"), ("low", "True low")]
)
def test_the_wish_to_think_reaches_the_template(think: object, text: str) -> None:
    source = "{{ enable_thinking | default('unset') }} {{ reasoning_effort | default('unset') }}"
    assert render(source, think=think) == text


@pytest.mark.parametrize(
    "expression",
    [
        "lipsum.__globals__.os.system('touch MARK')",
        "cycler.__init__.__globals__.os.system('touch MARK')",
        "''.__class__.__mro__[1].__subclasses__()",
        "self.__init__.__globals__",
        "(messages | attr('__class__')).__mro__",
        "messages.append(1)",
        "messages[0].update({'role': 'x'})",
    ],
)
def test_nothing_leads_out_of_the_sandbox(expression: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(TemplateError):
        render("{{ " + expression.replace("MARK", str(mark)) + ".x }}")
    assert not mark.exists()


def test_formatting_shows_no_attributes() -> None:
    assert "class" not in render("{{ '{0.__class__}'.format(messages) }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set ns = namespace(i=0) %}{% for a in range(99999) %}{% for b in range(999) %}{% set ns.i = ns.i + 1 %}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_endless_work_hits_the_time_limit_in_any_thread(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "RENDER_SECONDS", 0.3)
    template = ChatTemplate(source)
    errors: list[str] = []

    def work() -> None:
        try:
            template.render(USER)
        except TemplateError as error:
            errors.append(error.message)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert "ran for more than" in errors[0]


@pytest.mark.parametrize("expression", ["'a' * 10**9", "10**10**10", "[0] * 999999999", "9**9**9", "range(10**9)"])
def test_a_single_operation_cannot_fill_the_memory(expression: str) -> None:
    with pytest.raises(TemplateError):
        render("{{ " + expression + " }}")


def test_an_absurdly_long_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDERED_CHARACTERS", 1000)
    with pytest.raises(TemplateError, match="absurdly long"):
        render("{% for i in range(2000) %}x{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ none.x.y }}",
        "{{ messages | sort(attribute='x.y') | first | int + 'a' }}",
        "{{ strftime_now(7) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_bug_in_a_template_is_its_own_kind_of_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{{ x | nosuchfilter }}"])
def test_a_template_that_does_not_compile_says_so_at_once(source: str) -> None:
    with pytest.raises(TemplateError, match="cannot be used"):
        ChatTemplate(source)


def test_a_refusal_is_told_from_a_failure() -> None:
    with pytest.raises(Refusal, match="only pairs"):
        render("{{ raise_exception('only pairs') }}")


def test_without_a_template_the_fallback_is_used_and_says_so() -> None:
    template = ChatTemplate("  ")
    assert template.is_fallback
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
