"""PURE: forms of a conversation that strict templates accept without losing a word, and shorter ones to truncate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from localllm.chat.template import ChatTemplate, Refusal
from localllm.errors import TemplateError
from localllm.types import Message, ThinkLevel

Messages = tuple[Message, ...]


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    think: bool | ThinkLevel | None = None,
) -> str:
    """The prompt for the first form of `messages` that the template accepts and loses nothing of.

    When every form seems to lose text, the template rewrites it, and the first form that it accepts is as good as any.
    Raises TemplateError that names the first message at which the template gives up.
    """
    refusal, accepted = "", None
    for form in _forms(tuple(messages)):
        try:
            text = template.render(form, tools=tools, think=think)
        except Refusal as error:
            refusal = refusal or error.message
            continue
        if not _lost(form, text):
            return text
        accepted = accepted or text
    if accepted is not None:
        return accepted
    raise TemplateError(
        f"the model's chat template does not accept message {_first_refused(template, tuple(messages))}: {refusal}",
        hint="Many models want user and assistant to alternate, beginning with a user message.",
    )


def _forms(messages: Messages) -> Iterator[Messages]:
    """The conversation as it is, then ever more regular versions of it."""
    yield messages
    merged = merge_same_roles(gather_system(messages))
    if merged != messages:
        yield merged
    folded = merge_same_roles(fold_system(merged))
    if folded != merged:
        yield folded


def merge_same_roles(messages: Messages) -> Messages:
    """Join neighbours of one role with a blank line; tool results and tool calls stay apart, as they carry ids."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last.role == message.role != "tool" and not last.tool_calls and not message.tool_calls:
            merged[-1] = msgspec.structs.replace(
                last, content=_join(last.content, message.content), thinking=_join(last.thinking, message.thinking)
            )
        else:
            merged.append(message)
    return tuple(merged)


def gather_system(messages: Messages) -> Messages:
    """All system texts as one first message, in their order."""
    texts = [message.content for message in messages if message.role == "system"]
    others = tuple(message for message in messages if message.role != "system")
    return (Message("system", "\n\n".join(texts)), *others) if texts else others


def fold_system(messages: Messages) -> Messages:
    """For templates that know no system role: its text opens the first user message."""
    if not messages or messages[0].role != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0].role == "user":
        return (msgspec.structs.replace(rest[0], content=_join(system.content, rest[0].content)), *rest[1:])
    return (Message("user", system.content), *rest)


def drop_oldest(messages: Sequence[Message]) -> Messages | None:
    """Without the oldest exchange; None when only system messages and the last message are left.

    An exchange reaches from one user message to the next, so a tool call never loses its result or the reverse.
    """
    last = len(messages) - 1
    start = next((i for i, m in enumerate(messages) if m.role != "system"), last)
    if start >= last:
        return None
    end = next((i for i in range(start + 1, last) if messages[i].role == "user"), last)
    return tuple(m for i, m in enumerate(messages) if m.role == "system" or not start <= i < end)


def _join(left: str, right: str) -> str:
    return f"{left}\n\n{right}" if left and right else left or right


def _lost(messages: Messages, text: str) -> bool:
    """True when a system text does not reach the prompt: templates that only read the first message drop later ones.

    Spacing and case do not count: a template may change those.
    """
    prompt = _bare(text)
    return any(m.role == "system" and _bare(m.content) not in prompt for m in messages)


def _bare(text: str) -> str:
    return "".join(text.split()).casefold()


def _first_refused(template: ChatTemplate, messages: Messages) -> int:
    """Index of the message with which the conversation stops being acceptable."""
    for count in range(1, len(messages) + 1):
        try:
            template.render(messages[:count])
        except TemplateError:
            return count - 1
    return len(messages) - 1
