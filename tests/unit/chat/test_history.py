"""Ordinary conversations reach strict templates whole, or are refused with the message that is wrong."""

from __future__ import annotations

import pytest

from localllm.chat.history import drop_oldest, render
from localllm.chat.template import ChatTemplate
from localllm.errors import TemplateError
from localllm.types import Message, Role, ToolCall

# Wants user and assistant in turns, beginning with the user; a first system message is allowed.
ALTERNATING = ChatTemplate(
    "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# The same without any system message.
NO_SYSTEM = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# Prints the first system message only: the others vanish without a word.
FIRST_SYSTEM_ONLY = ChatTemplate(
    "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
LENIENT = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")


def talk(*pairs: tuple[Role, str]) -> tuple[Message, ...]:
    return tuple(Message(role, text) for role, text in pairs)


def test_what_is_accepted_is_left_as_it_is() -> None:
    messages = talk(("user", "a"), ("user", "b"))
    assert render(LENIENT, messages) == "[user]a[user]b"


def test_neighbours_of_one_role_are_joined_for_a_strict_template() -> None:
    messages = talk(("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))
    assert render(ALTERNATING, messages) == "[user]a\n\nb[assistant]c[user]d"


def test_system_text_goes_into_the_first_user_message_where_there_is_no_system_role() -> None:
    assert render(NO_SYSTEM, talk(("system", "be kind"), ("user", "a"))) == "[user]be kind\n\na"
    assert render(NO_SYSTEM, talk(("system", "be kind"))) == "[user]be kind"


@pytest.mark.parametrize("template", [ALTERNATING, NO_SYSTEM, FIRST_SYSTEM_ONLY, LENIENT])
@pytest.mark.parametrize(
    "messages",
    [
        talk(("system", "code ALPHA"), ("system", "code BETA"), ("user", "which codes?")),
        talk(("system", "code ALPHA"), ("user", "x"), ("assistant", "y"), ("system", "code BETA"), ("user", "z")),
        talk(("user", "code ALPHA"), ("user", "code BETA")),
    ],
)
def test_no_text_is_lost_whatever_the_template(template: ChatTemplate, messages: tuple[Message, ...]) -> None:
    text = render(template, messages)
    assert "code ALPHA" in text
    assert "code BETA" in text


def test_a_template_that_rewrites_system_text_is_believed() -> None:
    shouting = ChatTemplate("{{ messages[0].content | upper }}")
    assert render(shouting, talk(("system", "be kind"), ("user", "a"))) == "BE KIND"


def test_what_no_form_helps_is_refused_with_the_message_that_is_wrong() -> None:
    messages = talk(("assistant", "I begin"), ("user", "a"))
    with pytest.raises(TemplateError) as caught:
        render(ALTERNATING, messages)
    assert "message 0" in caught.value.message
    assert "must alternate" in caught.value.message


def test_dropping_takes_whole_exchanges_and_keeps_system_and_the_last_message() -> None:
    call = Message("assistant", tool_calls=(ToolCall("c", "f", {}),))
    messages = (
        *talk(("system", "s"), ("user", "1")),
        call,
        Message("tool", "result", tool_call_id="c"),
        *talk(("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5")),
    )
    once = drop_oldest(messages)
    assert once == talk(("system", "s"), ("user", "3"), ("assistant", "4"), ("user", "5"))
    twice = drop_oldest(once)
    assert twice == talk(("system", "s"), ("user", "5"))
    assert drop_oldest(twice) is None


@pytest.mark.parametrize(
    "messages", [(), talk(("user", "a")), talk(("system", "a")), talk(("system", "a"), ("user", "b"))]
)
def test_there_is_nothing_to_drop(messages: tuple[Message, ...]) -> None:
    assert drop_oldest(messages) is None


def test_dropping_always_comes_to_an_end() -> None:
    messages: tuple[Message, ...] | None = talk(
        ("assistant", "a"), ("tool", "b"), ("user", "c"), ("system", "d"), ("user", "e")
    )
    rounds = 0
    while messages is not None:
        assert messages[-1].content == "e"
        messages = drop_oldest(messages)
        rounds += 1
    assert rounds <= 4
