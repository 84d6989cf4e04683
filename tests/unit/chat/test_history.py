"""Ordinary conversations reach strict templates whole, or are refused with the message that is wrong."""

from __future__ import annotations

import time

import pytest
from tests.unit.chat.zoo import NAMES, TOOL, load

from localllm.chat.history import drop_oldest, normalise, render
from localllm.chat.template import ChatTemplate
from localllm.errors import TemplateError
from localllm.types import Message, Role, ToolCall

ALTERNATING = ChatTemplate(
    "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
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
LAST_ONLY = ChatTemplate("Translate: {{ messages[-1].content }}")


def talk(*pairs: tuple[Role, str]) -> tuple[Message, ...]:
    return tuple(Message(role, text) for role, text in pairs)


def calling(*calls: ToolCall, text: str = "", thinking: str = "") -> Message:
    return Message("assistant", text, thinking=thinking, tool_calls=calls)


def result(text: str, id: str = "", name: str = "") -> Message:
    return Message("tool", text, tool_name=name, tool_call_id=id)


ONE = ToolCall("call_aaaaaaaa", "add", {"a": "ARGUMENT1"})
TWO = ToolCall("call_bbbbbbbb", "add", {"a": "ARGUMENT2"})

CONVERSATIONS = {
    "one question": talk(("user", "TEXT1")),
    "system": talk(("system", "TEXT1"), ("user", "TEXT2")),
    "system only": talk(("system", "TEXT1")),
    "two system messages": talk(("system", "TEXT1"), ("system", "TEXT2"), ("user", "TEXT3")),
    "a late system message": talk(
        ("system", "TEXT1"), ("user", "TEXT2"), ("assistant", "TEXT3"), ("system", "TEXT4"), ("user", "TEXT5")
    ),
    "system at the end": talk(("user", "TEXT1"), ("assistant", "TEXT2"), ("user", "TEXT3"), ("system", "TEXT4")),
    "two users in a row": talk(("user", "TEXT1"), ("user", "TEXT2"), ("assistant", "TEXT3"), ("user", "TEXT4")),
    "two answers in a row": talk(("user", "TEXT1"), ("assistant", "TEXT2"), ("assistant", "TEXT3"), ("user", "TEXT4")),
    "an answer first, after system": talk(("system", "TEXT1"), ("assistant", "TEXT2"), ("user", "TEXT3")),
    "a call": (*talk(("user", "TEXT1")), calling(ONE), result("TEXT2", ONE.id)),
    "a call after a text": (*talk(("user", "TEXT1")), calling(ONE, text="TEXT2"), result("TEXT3", ONE.id)),
    "a call after a text and a thought": (
        *talk(("user", "TEXT1")),
        calling(ONE, text="TEXT2", thinking="hmm"),
        result("TEXT3", ONE.id),
    ),
    "two calls": (
        *talk(("user", "TEXT1")),
        calling(ONE, TWO),
        result("TEXT2", ONE.id),
        result("TEXT3", TWO.id),
        *talk(("assistant", "TEXT4"), ("user", "TEXT5")),
    ),
    "an interrupted call": (*talk(("user", "TEXT1")), calling(ONE), result("TEXT2", ONE.id), *talk(("user", "TEXT3"))),
    "a call without ids": (
        *talk(("user", "TEXT1")),
        calling(ToolCall("", "add", {"a": "ARGUMENT1"})),
        result("TEXT2", name="add"),
    ),
}
WORDS = [f"{kind}{number}" for kind in ("TEXT", "ARGUMENT") for number in range(1, 6)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_no_text_is_lost_whatever_the_template(name: str, messages: tuple[Message, ...]) -> None:
    has_calls = any(message.tool_calls for message in messages)
    prompt = render(load(name), messages, tools=(TOOL,) if has_calls else ())
    given = repr(messages)
    for word in WORDS:
        assert prompt.count(word) == given.count(word)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_hears_of_its_tools_whatever_the_template(name: str) -> None:
    assert "add" in render(load(name), talk(("user", "2 + 3?")), tools=(TOOL,))


def test_tools_that_a_template_hides_are_described_after_what_the_system_says() -> None:
    prompt = render(load("deepseek"), talk(("system", "Be kind."), ("user", "2 + 3?")), tools=(TOOL,))
    assert prompt.startswith("<s>Be kind.\n\nYou can use these tools:")
    assert '"description": "Adds two numbers."' in prompt
    assert '{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}' in prompt


def test_what_is_accepted_is_left_as_it_is() -> None:
    messages = talk(("user", "a"), ("user", "b"))
    assert normalise(messages, LENIENT) == messages
    assert render(LENIENT, messages) == "[user]a[user]b"


def test_neighbours_of_one_role_are_joined_for_a_strict_template() -> None:
    messages = talk(("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))
    assert render(ALTERNATING, messages) == "[user]a\n\nb[assistant]c[user]d"


def test_leading_system_messages_are_joined_and_late_ones_stay_near_their_place() -> None:
    messages = talk(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", "e"), ("user", "f"))
    assert render(ALTERNATING, messages) == "[SYS]a\n\nb[user]c[assistant]d[user]e\n\nf"


def test_system_text_goes_into_the_first_user_message_where_there_is_no_system_role() -> None:
    assert render(NO_SYSTEM, talk(("system", "be kind"), ("user", "a"))) == "[user]be kind\n\na"
    assert render(NO_SYSTEM, talk(("system", "be kind"))) == "[user]be kind"


def test_text_and_calls_are_split_for_a_template_that_writes_one_or_the_other() -> None:
    messages = (*talk(("user", "hi")), calling(ONE, TWO, text="Let me see."), result("1", ONE.id), result("2", TWO.id))
    assert [m.role for m in normalise(messages, load("llama3"))] == [
        *("user", "assistant", "assistant", "tool", "assistant", "tool")
    ]


def test_calls_are_written_as_the_model_writes_them_for_a_template_that_cannot() -> None:
    messages = (*talk(("user", "hi")), calling(ONE), result("5", ONE.id))
    prompt = render(load("smollm3"), messages, tools=(TOOL,))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": "ARGUMENT1"}}\n</tool_call>' in prompt


def test_results_are_matched_to_calls_that_came_without_ids() -> None:
    messages = (
        calling(ToolCall("", "add", {}), ToolCall("", "now", {})),
        result("noon", name="now"),
        result("5"),
    )
    form = normalise(messages, LENIENT_CALLS)
    ids = [call.id for call in form[0].tool_calls]
    assert len(set(ids)) == 2
    assert all(ids)
    assert [(m.tool_name, m.tool_call_id) for m in form[1:]] == [("now", ids[1]), ("add", ids[0])]


LENIENT_CALLS = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
)


def test_a_template_that_rewrites_text_is_believed() -> None:
    shouting = ChatTemplate("{% for m in messages %}{{ m.content | upper }} {% endfor %}")
    assert render(shouting, talk(("system", "be kind"), ("user", "a"))) == "BE KIND A "


def test_earlier_thinking_may_be_left_out_and_text_with_tags_is_the_templates_business() -> None:
    messages = (
        *talk(("user", "a")),
        Message("assistant", "<think>hmm</think>b", thinking="hmm"),
        *talk(("user", "c")),
    )
    prompt = render(load("qwen3"), messages)
    assert "hmm" not in prompt
    assert "assistant\nb<|im_end|>" in prompt


def test_what_no_form_helps_is_refused_with_the_message_that_is_wrong() -> None:
    messages = talk(("assistant", "I begin"), ("user", "a"))
    with pytest.raises(TemplateError, match=r"message 0.*must alternate"):
        render(ALTERNATING, messages)


PICKY = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 > 4 %}{{ raise_exception('enough') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def test_the_wrong_message_is_named_in_a_long_conversation_too() -> None:
    turns: list[tuple[Role, str]] = [("user", "q"), ("assistant", "a")] * 100
    with pytest.raises(TemplateError, match="message 5: enough") as caught:
        render(PICKY, talk(*turns))
    assert caught.value.details["message_index"] == 5


def test_a_text_that_is_left_out_in_every_form_is_an_error_and_not_a_silence() -> None:
    assert render(LAST_ONLY, talk(("user", "a"))) == "Translate: a"
    with pytest.raises(TemplateError, match="message 1: it leaves out"):
        render(LAST_ONLY, talk(("user", "a"), ("assistant", "b"), ("user", "c")))


def test_trying_all_forms_takes_no_longer_than_one_template_may() -> None:
    slow = ChatTemplate(
        "{% for a in range(4000) %}{% for b in range(200) %}{% endfor %}{% endfor %}"
        "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    turns: list[tuple[Role, str]] = [("user", "q"), ("assistant", "a"), ("system", "s")] * 400
    started = time.monotonic()
    with pytest.raises(TemplateError):
        render(slow, talk(*turns))
    assert time.monotonic() - started < 4


# --- Shortening


ROUND1 = (calling(ONE, text="1"), result("r1", ONE.id))
ROUND2 = (calling(TWO, text="2"), result("r2", TWO.id))


def test_dropping_takes_whole_exchanges_and_keeps_system_and_the_last_message() -> None:
    messages = (
        *talk(("system", "s"), ("user", "1")),
        *ROUND1,
        *talk(("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5")),
    )
    once = drop_oldest(messages)
    assert once == talk(("system", "s"), ("user", "3"), ("assistant", "4"), ("user", "5"))
    twice = drop_oldest(once)
    assert twice == talk(("system", "s"), ("user", "5"))
    assert drop_oldest(twice) is None


def test_a_result_at_the_end_keeps_its_call_and_the_question_that_it_is_about() -> None:
    question = talk(("user", "q"))
    messages = (*talk(("user", "old"), ("assistant", "old")), *question, *ROUND1, *ROUND2)
    once = drop_oldest(messages)
    assert once == (*question, *ROUND1, *ROUND2)
    twice = drop_oldest(once)
    assert twice == (*question, *ROUND2)
    assert drop_oldest(twice) is None


def test_late_system_messages_are_kept_when_what_is_around_them_goes() -> None:
    messages = talk(("user", "1"), ("system", "s"), ("assistant", "2"), ("user", "3"))
    assert drop_oldest(messages) == talk(("system", "s"), ("user", "3"))


@pytest.mark.parametrize(
    "messages",
    [
        (),
        talk(("user", "a")),
        talk(("system", "a")),
        talk(("system", "a"), ("user", "b")),
        (*talk(("user", "q")), *ROUND1),
    ],
)
def test_there_is_nothing_to_drop(messages: tuple[Message, ...]) -> None:
    assert drop_oldest(messages) is None


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_dropping_always_comes_to_an_end_and_keeps_the_end(messages: tuple[Message, ...]) -> None:
    shorter: tuple[Message, ...] | None = messages
    rounds = 0
    while shorter is not None:
        assert shorter[-1] == messages[-1]
        calls = {call.id for message in shorter for call in message.tool_calls}
        assert {message.tool_call_id for message in shorter if message.role == "tool"} <= calls | {""}
        shorter = drop_oldest(shorter)
        rounds += 1
    assert rounds <= len(messages)
