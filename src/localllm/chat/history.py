"""Ordinary conversations for templates that accept only some: rewritten without losing a word, or refused by index.

What a template accepts is found out with a stand-in for the conversation in which each text is a unique word: when a
word does not come out, the template would have left that text out without telling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from localllm.chat import forms
from localllm.chat.filters import Refusal
from localllm.chat.formats import describe_tools, write_calls
from localllm.chat.forms import Form, Messages
from localllm.chat.limits import LimitExceeded
from localllm.chat.shapes import Tools
from localllm.chat.template import ChatTemplate
from localllm.errors import TemplateError
from localllm.types import Message, ThinkLevel, ToolCall


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Tools = (),
    think: bool | ThinkLevel | None = None,
) -> str:
    """The prompt for `messages`, in the first form of them that the template accepts whole.

    Raises TemplateError that names the message at which the template gives up.
    """
    with template.limits():
        form = normalise(messages, template, tools=tools)
        return template.render(form, tools=() if template.hides_tools else tools, think=think)


def normalise(messages: Sequence[Message], template: ChatTemplate, *, tools: Tools = ()) -> Messages:
    """The first form of `messages` of which the template keeps every text. Raises TemplateError as `render` does.

    When the template hides `tools`, they are described in the system message.
    """
    linked = forms.link_calls(tuple(messages))
    with template.limits():
        if tools and template.hides_tools:
            linked, tools = forms.add_system(linked, describe_tools(template.source, tools)), ()
        form = _accepted_form(linked, template, tools)
        if form is None:
            raise _refused(linked, template, tools, num_added=len(linked) - len(messages))
        return form


def drop_oldest(messages: Sequence[Message]) -> Messages | None:
    """Shorter by the oldest exchange, or None when nothing more may go.

    System messages stay, and so does the last question with the latest that came of it. An exchange reaches from one
    question to the next; when only the last one is left, its oldest calls go, each with its results.
    """
    spoken = [index for index, message in enumerate(messages) if message.role != "system"]
    if not spoken:
        return None
    question = max((i for i in spoken if messages[i].role == "user"), default=spoken[0])
    end = next((i for i in spoken[1:] if messages[i].role == "user"), question)
    dropped = range(spoken[0], end) if spoken[0] < question else _oldest_round(messages, question)
    shorter = tuple(m for i, m in enumerate(messages) if m.role == "system" or i not in dropped)
    return shorter if len(shorter) < len(messages) else None


def _oldest_round(messages: Sequence[Message], question: int) -> range:
    """What the assistant said first after the last question, with the results of its calls; not the latest such."""
    starts = [i for i in range(question + 1, len(messages)) if messages[i].role == "assistant"]
    return range(starts[0], starts[1]) if len(starts) > 1 else range(0)


def _accepted_form(messages: Messages, template: ChatTemplate, tools: Tools) -> Messages | None:
    return next((form for form in _forms(messages, template.source) if _keeps(template, form, tools)), None)


def _forms(messages: Messages, source: str) -> Iterator[Messages]:
    """The conversation as it is, then ever more changed."""
    seen: list[Messages] = []
    for steps in _plans(source):
        form = messages
        for step in steps:
            form = step(form)
        if form not in seen:
            seen.append(form)
            yield form


def _plans(source: str) -> Iterator[tuple[Form, ...]]:
    write: Form = forms.write_calls(lambda calls: write_calls(source, calls))
    joined, folded = (forms.join_system, forms.merge_same_roles), (forms.fold_system, forms.merge_same_roles)
    yield ()
    for system in (joined, folded):
        yield system
        yield (forms.split_calls, *system)
        yield (write, *system)
        yield (write, forms.write_results, *system)


def _keeps(template: ChatTemplate, messages: Messages, tools: Tools) -> bool:
    words: list[str] = []
    stand_in = [_with_words(message, words) for message in messages]
    try:
        prompt = template.render(stand_in, tools=tools).casefold()
    except LimitExceeded:
        raise
    except TemplateError:
        return False
    return all(word in prompt for word in words)


def _with_words(message: Message, words: list[str]) -> Message:
    """`message` with a new word for each of its texts. Thinking may be left out: most templates do so on purpose."""
    return msgspec.structs.replace(
        message,
        content=_new_word(words) if message.content.strip() else message.content,
        thinking="t" if message.thinking else "",
        tool_calls=tuple(_call_with_words(call, words) for call in message.tool_calls),
    )


def _call_with_words(call: ToolCall, words: list[str]) -> ToolCall:
    arguments = {key: _new_word(words) for key in call.arguments} or {_new_word(words): ""}
    return ToolCall(call.id, call.name, arguments)


def _new_word(words: list[str]) -> str:
    words.append(f"qneedle{len(words)}q")
    return words[-1]


def _refused(messages: Messages, template: ChatTemplate, tools: Tools, *, num_added: int) -> TemplateError:
    """The error for a conversation of which no form is accepted. Messages added at its beginning do not count."""
    index = _first_refused(messages, template, tools)
    reason = "it leaves out what the message says"
    for form in _forms(messages[: index + 1], template.source):
        try:
            template.render(form, tools=tools)
        except TemplateError as error:
            reason = error.message
    index = max(0, index - num_added)
    return TemplateError(
        f"the model's chat template does not accept message {index}: {reason}",
        hint="Many models want user and assistant to alternate, beginning with a user message.",
        message_index=index,
    )


def _first_refused(messages: Messages, template: ChatTemplate, tools: Tools) -> int:
    """Index of a message up to which the conversation is accepted and with which it no longer is."""
    accepted, refused = 0, len(messages)
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        if _accepted_form(messages[:middle], template, tools) is None:
            refused = middle
        else:
            accepted = middle
    return max(0, refused - 1)


__all__ = ["Refusal", "drop_oldest", "normalise", "render"]
